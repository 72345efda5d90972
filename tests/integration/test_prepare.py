"""Preparation for real, on Ray: accounted for, the same to the byte whatever happens, and clear when it cannot be."""

import json

import pytest
import yaml
from messages import all_of, says
from preparing import checksums, config_of
from volumes import small_volume

from declutr.common.errors import ConfigError, ShardError
from declutr.pipeline.prepare import main, prepare
from declutr.pipeline.shards.shards import ShardSet, check_shards, load_manifest

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("session")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """About 1.5 MB in a folder of two files, with one bad line."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": f"document {n}: " + f"{n * 31 % 97} words of it " * (n % 60)}) for n in range(1500)]
    (folder / "a.jsonl").write_bytes("\n".join(lines[:1000]).encode() + b"\n\xff\n")
    (folder / "b.jsonl").write_text("\n".join(lines[1000:]))
    return folder


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "out"
    return folder, prepare(config_of(corpus, folder))


def test_every_document_is_accounted_for(prepared):
    folder, manifest = prepared
    totals = manifest.totals
    assert totals["read"] == 1501
    assert manifest.failed == {"invalid_utf8": 1}
    assert totals["kept"] + manifest.dropped["too_short"] + 1 == 1501
    assert load_manifest(folder) == manifest
    assert check_shards(folder, full=True) == []
    train, held_out = ShardSet(folder, "train"), ShardSet(folder, "held-out")
    assert (train.num_documents, held_out.num_documents) == (totals["kept_train"], totals["kept_held_out"])
    assert 0.1 < held_out.num_documents / totals["kept"] < 0.3
    progress = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    assert progress[-1]["documents"] == 1501
    assert progress[-1]["input_bytes"] == progress[-1]["total_input_bytes"]


def test_the_same_command_again_prints_one_line_and_changes_nothing(corpus, prepared, tmp_path, capsys):
    folder, manifest = prepared
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    values = config_of(corpus, folder).model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"prepare": values}))
    assert main([str(tmp_path / "config.yaml")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    says(line, "1,501 documents read", f"{manifest.totals['kept_held_out']} held out")
    assert load_manifest(folder) == manifest
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_lost_and_truncated_shards_are_made_again_to_the_byte(corpus, tmp_path, prepared):
    folder = tmp_path / "out"
    prepare(config_of(corpus, folder))
    assert checksums(folder) == checksums(prepared[0])
    names = [shard.name for shard in load_manifest(folder).shards]
    (folder / names[0]).unlink()
    (folder / names[1]).write_bytes((folder / names[1]).read_bytes()[:-1])
    (folder / ".train-00000.arrow.1.tmp").write_text("left by a killed run")
    prepare(config_of(corpus, folder))
    assert checksums(folder) == checksums(prepared[0])


def test_other_settings_or_inputs_in_the_same_folder_are_refused(corpus, prepared, tmp_path):
    folder, _ = prepared
    before = checksums(folder)
    with pytest.raises(ConfigError, match=all_of("geometry.max_tokens", "here 16", "there 32")):
        prepare(config_of(corpus, folder, geometry={"num_anchors": 1, "max_tokens": 16}))
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="other settings"):
        prepare(config_of(tmp_path, folder))
    extra = corpus / "c.jsonl"
    extra.write_text('{"text": "new"}')
    try:
        with pytest.raises(ConfigError, match=all_of("other inputs", "1 of")):
            prepare(config_of(corpus, folder))
    finally:
        extra.unlink()
    assert checksums(folder) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ("empty", "no documents")),
        ("not json\n", ("no document", "all 1 failed", "1 invalid_json")),
        (
            '{"text": "too short"}\n{"text": ""}\n',
            ("none of 2 documents", "the longest", "64"),
        ),
    ],
)
def test_a_corpus_of_which_nothing_is_kept_says_why_and_leaves_nothing(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=all_of(message)):
        prepare(config_of(tmp_path / "a.jsonl", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_ends_in_words_and_the_same_command_continues(corpus, tmp_path, prepared):
    with small_volume(tmp_path / "volume", 2) as volume:
        config = config_of(corpus, volume.path / "out")
        volume.fill(leave_bytes=400_000)
        with pytest.raises(ShardError, match=all_of("No space left on device", "same command")):
            prepare(config)
        assert not (volume.path / "out" / "manifest.json").exists()
        volume.drain()
        prepare(config)
        assert checksums(volume.path / "out") == checksums(prepared[0])


def test_a_replaced_file_is_found_after_copies_were_removed(corpus, tmp_path):
    """The state of the inputs goes with a unit from its candidates to what is kept of them."""
    (tmp_path / "in").mkdir()
    for path in corpus.glob("[ab].jsonl"):
        (tmp_path / "in" / path.name).write_bytes(path.read_bytes())
    config = config_of(tmp_path / "in", tmp_path / "out")
    manifest = prepare(config)
    before = checksums(tmp_path / "out")
    changed = tmp_path / "in" / "a.jsonl"
    changed.touch()
    assert prepare(config, verify_inputs=True) == manifest
    raw = bytearray(changed.read_bytes())
    raw[200_000] ^= 1
    changed.write_bytes(raw)
    with pytest.raises(ConfigError, match="units changed"):
        prepare(config)
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="restore"):
        prepare(config)
    assert checksums(tmp_path / "out").items() <= before.items()
