"""Preparation into an object store: the bytes of a folder, whatever is killed, lost, refused or done twice."""

import preparing
import pytest
from messages import all_of, says
from preparing import checksums
from s3server import faulty_store, s3_server

from declutr.common.errors import ConfigError, RunLockedError, ShardError
from declutr.common.lock import LOCK, StoreLock
from declutr.common.stores.copies import fetch_all
from declutr.common.stores.folder import Folder
from declutr.pipeline.prepare import plan_ahead, prepare
from declutr.pipeline.shards.shards import check_shards

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("session")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """About 0.5 MB with copies, near copies and a line that cannot be read."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [f"document {n}: " + f"{n * 31 % 97} words of it " * (5 + n % 60) for n in range(500)]
    texts[100:110] = texts[:10]
    preparing.write_jsonl(folder / "a.jsonl", *({"text": text} for text in texts), b"\xff\n")
    return folder


def config_of(corpus, output, cache, **changes):
    values = {"write_rejected": True, "cache": str(cache), "storage_retry_seconds": 3, "session": {"num_cpus": 2}}
    return preparing.config_of(corpus, output, **values | changes)


def pulled(address, folder):
    fetch_all(Folder(address), folder)
    return checksums(folder)


@pytest.fixture(scope="module")
def local(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    prepare(config_of(corpus, folder / "out", folder / "cache"))
    return checksums(folder / "out")


@pytest.fixture(scope="module")
def bucket():
    with s3_server() as address:
        yield address


@pytest.mark.parametrize("duplicates", [{"near": {}}, {"exact": False}])
def test_the_bytes_are_those_of_a_folder(corpus, bucket, tmp_path, duplicates, monkeypatch):
    monkeypatch.setattr("declutr.pipeline.duplicates.search.KEYS_PER_BUCKET", 5_000)  # three buckets, each a task
    address = bucket(f"shards-{len(str(duplicates))}")
    place, cache = Folder(address), tmp_path / "cache"
    config = config_of(corpus, address, cache, duplicates=duplicates)
    manifest = prepare(config)
    assert manifest == prepare(config_of(corpus, tmp_path / "out", cache, duplicates=duplicates))
    assert pulled(address, tmp_path / "pulled") == checksums(tmp_path / "out")
    assert check_shards(tmp_path / "pulled", full=True) == []
    assert not {"candidates", "sent", LOCK} & set(place.names())
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert prepare(config) == manifest
    before = place.modified("train-00001.arrow")
    place.delete("train-00000.arrow")
    prepare(config)
    assert pulled(address, tmp_path / "mended") == checksums(tmp_path / "out")
    assert place.modified("train-00001.arrow") == before, "only what is lost is made again"
    sizes = place.sizes()
    with pytest.raises(ConfigError, match=all_of("seed", "here 1", "there 0")):
        prepare(config.model_copy(update={"seed": 1}))
    assert place.sizes() == sizes


def test_a_stopped_command_continues_and_makes_only_what_is_missing(corpus, bucket, tmp_path, local):
    """As after kills: some units are whole, one lost a file, one has no sidecar."""
    place = Folder(bucket("stopped"))
    config = config_of(corpus, place.url, tmp_path / "cache")
    with pytest.raises(ShardError, match="max_error_rate"):
        prepare(config.model_copy(update={"max_error_rate": 0.0}))
    assert not place.is_whole()
    assert "manifest.json" not in place.sizes()
    place.delete("units/00001.json")
    place.put("train-00002.arrow", b"cut off")
    place.delete("candidates/keys/00003.arrow")
    before = place.modified("train-00000.arrow")
    prepare(config)
    assert pulled(place.url, tmp_path / "pulled") == local
    assert place.modified("train-00000.arrow") == before


def test_foreign_files_another_command_and_a_cache_that_cannot_be_written_are_refused(corpus, bucket, tmp_path):
    place = Folder(bucket("refused"))
    place.put("mine.txt", b"mine")
    with pytest.raises(ConfigError, match=all_of("`prepare`", "files")):
        prepare(config_of(corpus, place.url, tmp_path / "cache"))
    assert place.names() == ["mine.txt"]
    with pytest.raises(ConfigError, match=all_of("cache = /proc/nothing", "No such file", "folder")):
        prepare(config_of(corpus, bucket("uncached"), "/proc/nothing"))
    place = Folder(bucket("twice"))
    with StoreLock(place, lambda: None):
        names = place.names()
        with pytest.raises(RunLockedError, match=all_of("another command", "host", "pid")):
            prepare(config_of(corpus, place.url, tmp_path / "cache"))
        assert place.names() == names


def test_a_plan_and_a_corpus_of_which_nothing_is_kept_leave_nothing(corpus, bucket, tmp_path):
    short = preparing.write_jsonl(tmp_path / "a.jsonl", {"text": "too short"}, {"text": ""})
    for output, place in ((tmp_path / "out", None), (bucket("nothing"), Folder(bucket("nothing")))):
        with pytest.raises(ConfigError, match=all_of("none of 2 documents", "the longest", "64")):
            prepare(config_of(short, output, tmp_path / "cache"))
        assert plan_ahead(config_of(corpus, output, tmp_path / "cache")).documents > 0
        assert place is None or (place.sizes(), place.names()) == ({}, [])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("status", "code", "after", "words"),
    [
        (403, "AccessDenied", 0, ["nothing can be", "refuses", ("credentials", "permissions")]),
        pytest.param(503, "SlowDown", 12, ["answered", "request rate", "same command"], marks=pytest.mark.nightly),
        (400, "ExpiredToken", 35, ["refuses", ("credentials", "expired", "renew"), "same command"]),
    ],
)
def test_a_store_that_refuses_writes_ends_in_words_and_nothing_is_lost(
    corpus, tmp_path, local, status, code, after, words
):
    """Before any work, while units are written, and while units without copies are written."""
    with faulty_store() as (address, faults):
        place = Folder(address("out"))
        config = config_of(corpus, place.url, tmp_path / "cache", storage_retry_seconds=1)
        faults.refuse(status, code, methods=("PUT", "POST"), after=after)
        with pytest.raises((ShardError, ConfigError)) as caught:
            prepare(config)
        says(caught.value, *words)
        assert not place.is_whole()
        names = place.names()
        faults.clear()
        if not after:
            assert place.sizes() == {}
            return
        prepare(config)
        assert {name for name in names if name.endswith(".arrow")} <= set(place.names())
        assert pulled(place.url, tmp_path / "pulled") == local
