"""Fetching over real HTTP from a server on this machine: checked, resumed, and nothing extracted blindly."""

import io
import tarfile
import zipfile

import pytest
from fileserver import file_server
from messages import all_of, says
from pydantic import ValidationError

from declutr.cli.main import main
from declutr.evaluation.senteval.data.lines import git_sha1
from declutr.evaluation.senteval.data.loading import task_files
from declutr.evaluation.senteval.data.tasks import TASKS, find
from declutr.evaluation.senteval.download.downloading import download, transfers
from declutr.evaluation.senteval.download.snli_archive import SnliError, make_split, tokenize
from declutr.evaluation.senteval.download.sources import Sources, public_sources, relocated
from declutr.evaluation.senteval.download.transfer import TransferError, fetch

TEXT = b"".join(b"%06d a line\n" % number for number in range(5000))
MEBI = 1 << 20


@pytest.fixture
def server():
    with file_server({"file": TEXT}) as served:
        yield served


def archive_of(members):
    """A tar of `(name, content or TarInfo)`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members:
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                archive.addfile(info)
    return buffer.getvalue()


def test_a_broken_connection_is_taken_up_where_it_broke(server, tmp_path):
    server.break_after = [10_000, 20_000]
    assert fetch(f"{server.address}/file", tmp_path / "there/file", MEBI) == len(TEXT)
    assert (tmp_path / "there/file").read_bytes() == TEXT
    assert [asked for _, asked in server.requests] == ["", "bytes=10000-", "bytes=30000-"]
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]


def test_the_next_call_goes_on_where_the_last_gave_up(server, tmp_path):
    server.break_after = [1000] * 3
    with pytest.raises(TransferError, match=all_of("3,000 bytes", "same command")):
        fetch(f"{server.address}/file", tmp_path / "file", MEBI)
    assert not (tmp_path / "file").exists()
    assert fetch(f"{server.address}/file", tmp_path / "file", MEBI) == len(TEXT) - 3000
    assert (tmp_path / "file").read_bytes() == TEXT


@pytest.mark.parametrize("ranges", [True, False])
def test_another_content_or_a_server_without_ranges_starts_anew(server, tmp_path, ranges):
    server.break_after = [1000] * 3
    with pytest.raises(TransferError):
        fetch(f"{server.address}/file", tmp_path / "file", MEBI)
    server.ranges = ranges
    server.files["file"] = TEXT.upper()
    fetch(f"{server.address}/file", tmp_path / "file", MEBI)
    assert (tmp_path / "file").read_bytes() == TEXT.upper()


def test_download_of_a_wrong_size_or_hash_leaves_nothing(server, tmp_path):
    with pytest.raises(TransferError, match=all_of("70,000 bytes", "69,999")):
        fetch(f"{server.address}/file", tmp_path / "file", len(TEXT) - 1)
    with pytest.raises(TransferError, match="404"):
        fetch(f"{server.address}/nowhere", tmp_path / "file", MEBI)

    def refuse(_):
        raise ValueError("not the one")

    with pytest.raises(TransferError, match="not the one"):
        fetch(f"{server.address}/file", tmp_path / "file", MEBI, refuse)
    assert not any(tmp_path.rglob("file"))
    assert not list(tmp_path.glob(".*.part"))


def test_a_file_must_have_its_published_hash(server, tmp_path):
    path = "downstream/SST/fine/sentiment-dev"
    (tmp_path / "right").write_bytes(TEXT)
    for digest, outcome in ((git_sha1(tmp_path / "right"), "fetched"), ("", "failed")):
        sources = Sources.model_validate(
            {"files": [{"path": path, "url": f"{server.address}/file", "git_sha1": digest}]}
        )
        (found,) = download(tmp_path / outcome, sources)
        assert found.outcome == outcome
        assert (tmp_path / outcome / path).exists() == (outcome == "fetched")
    says(found.note, "published file")  # than published.json has for that path


def test_an_archive_is_read_as_a_stream_and_only_what_is_wanted_is_written(server, tmp_path):
    link = tarfile.TarInfo("MR/rt-polarity.neg")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    server.files["a/senteval.tar"] = archive_of(
        [
            ("../../escaped", b"x"),
            ("/absolute", b"x"),
            ("./deep/er/CR/custrev.pos", b"good\n"),
            ("CR/custrev.pos.bak", b"x"),
            ("MR/rt-polarity.neg", link),
            ("SUBJ/subj.objective", b"objective\n"),
        ]
    )
    wanted = ("CR/custrev.pos", "MR/rt-polarity.neg", "SUBJ/subj.objective")
    archive = {"url": f"{server.address}/a/senteval.tar", "below": "downstream/"}
    sources = Sources.model_validate({"archives": [{**archive, "paths": [f"downstream/{name}" for name in wanted]}]})
    data = tmp_path / "data"
    (data / "downstream/SUBJ").mkdir(parents=True)
    (data / "downstream/SUBJ/subj.objective").write_bytes(b"mine\n")
    outcomes = {file.path: file for file in download(data, sources)}
    says(outcomes["downstream/CR/custrev.pos"].note, "copy", "known hash")
    says(outcomes["downstream/MR/rt-polarity.neg"].note, "not", "senteval.tar")
    assert outcomes["downstream/SUBJ/subj.objective"].outcome == "kept"
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {
        "data/downstream/CR/custrev.pos": b"good\n",
        "data/downstream/SUBJ/subj.objective": b"mine\n",
    }
    says(
        "\n".join(transfers(tuple(outcomes.values()), sources)),
        "failed",
        "downstream/MR/rt-polarity.neg",
        "senteval.tar",
    )


def test_a_broken_archive_is_fetched_again_the_next_time(server, tmp_path):
    whole = archive_of([("CR/custrev.pos", b"good\n" * 5000)])
    server.files["senteval.tar"] = whole[:9000]
    paths = ["downstream/CR/custrev.pos"]
    sources = Sources.model_validate(
        {"archives": [{"url": f"{server.address}/senteval.tar", "below": "downstream/", "paths": paths}]}
    )
    assert download(tmp_path, sources)[0].outcome == "failed"
    assert not (tmp_path / paths[0]).exists()
    server.files["senteval.tar"] = whole
    assert download(tmp_path, sources)[0].outcome == "fetched"
    assert (tmp_path / paths[0]).read_bytes() == b"good\n" * 5000


HEADER = (
    "gold_label sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse sentence1 sentence2 x"
)


def snli_zip(path, header=HEADER):
    rows = [
        ("neutral", 'A "man" isn\'t here.', "He can't: no."),
        ("-", "x", "y"),
        ("entailment", "A dog.", "Caf\u00e9 (x)!"),
    ]
    lines = [header.replace(" ", "\t")] + ["\t".join((label, "", "", "", "", a, b, "z")) for label, a, b in rows]
    with zipfile.ZipFile(path, "w") as archive:
        for split in ("train", "dev", "test"):
            archive.writestr(f"snli_1.0/snli_1.0_{split}.txt", "\n".join(lines) + "\n")
            archive.writestr(f"__MACOSX/snli_1.0/snli_1.0_{split}.txt", "junk")
    return path


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ('"Yes," he said.', "`` Yes , '' he said . "),
        ("I cannot go; it's 5%...", "I can not go ; it 's 5 % ... "),
        ("Mr. Lee's dogs' bone (big) won't do!", "Mr. Lee 's dogs ' bone ( big ) wo n't do ! "),
        ("They're gonna -- 'tis so", "They 're gon na -- 't is so "),
        ("", ""),
    ],
)
def test_treebank_words_are_split_as_published(raw, words):
    """Answers of the sed script itself, under GNU sed."""
    assert tokenize(raw) == words


def test_snli_is_made_from_its_zip(tmp_path):
    archive = snli_zip(tmp_path / "snli_1.0.zip")
    make_split(archive, "dev", tmp_path / "out", {})
    made = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "out").iterdir()}
    assert made == {
        "labels.dev": "neutral\nentailment\n",
        "s1.dev": "A `` man '' is n't here . \nA dog . \n",
        "s2.dev": "He ca n't : no . \nCaf\u00e9 ( x ) ! \n",
    }
    with pytest.raises(SnliError, match=all_of("s2.test", "snli_1.0.zip", "SHA-1", "expected 0000")):
        make_split(archive, "test", tmp_path / "out", {"s2.test": "0000"})
    with pytest.raises(SnliError, match=r"has columns gold, "):
        make_split(snli_zip(archive, HEADER.replace("gold_label", "gold")), "test", tmp_path / "out", {})
    archive.write_bytes(b"no zip")
    with pytest.raises(SnliError, match=all_of("broken", "SNLI")):
        make_split(archive, "test", tmp_path / "out", {})
    assert len(list((tmp_path / "out").iterdir())) == 3  # nothing of test, not even half


def test_an_snli_that_is_not_the_published_one_is_not_kept(server, tmp_path):
    server.files["snli.zip"] = snli_zip(tmp_path / "snli.zip").read_bytes()
    sources = Sources.model_validate({"snli": {"url": f"{server.address}/snli.zip"}})
    found = download(tmp_path / "data", sources)
    assert [file.outcome for file in found] == ["failed"] * 9
    says(found[0].note, "labels.train", "snli.zip", "SHA-1")
    assert not any(path.is_file() for path in (tmp_path / "data").rglob("*"))


def test_the_public_table_covers_every_task_or_says_why_not():
    sources = public_sources()
    covered = {file.path for file in sources.files} | {path for archive in sources.archives for path in archive.paths}
    covered |= set(task_files(find("SNLI"))) if sources.snli else set()
    gone = {name for entry in sources.gone for name in entry.tasks}
    for task in TASKS:
        assert (task.name in gone) != set(task_files(task)).issubset(covered), task.name
    assert all(file.expected for file in sources.files)  # every single file is pinned
    moved = relocated(sources, "http://mirror/x/")
    assert moved.files[0].url == "http://mirror/x/probing/sentence_length.txt"
    assert moved.archives[0].url == "http://mirror/x/senteval.tar"


@pytest.mark.parametrize("path", ["/etc/passwd", "downstream/../../x", "elsewhere/x"])
def test_a_table_cannot_write_outside_the_data(path):
    with pytest.raises(ValidationError, match=all_of("downstream/", "probing/")):
        Sources.model_validate({"files": [{"path": path, "url": "http://x/y"}]})
    with pytest.raises(ValidationError, match="String should match pattern"):
        Sources.model_validate({"files": [{"path": "probing/x", "url": "file:///etc/passwd"}]})


def test_download_command_counts_and_names_what_failed(server, tmp_path, capsys):
    """From a mirror that has one file: what was fetched, what failed, what cannot be had, and the check of it all."""
    server.files["senteval.tar"] = archive_of([("SUBJ/subj.objective", b"an objective line\n")])
    arguments = ["evaluate", "--download", str(tmp_path), "--mirror", server.address]
    assert main(arguments) == 1
    said = capsys.readouterr().out
    says(said, "1 fetched", "0 already present", "90 failed")
    assert "404" in said
    says(said, "ImageCaptionRetrieval", "pickles")
    assert "no subj.subjective" in said
    (tmp_path / "empty").mkdir()
    assert main(["evaluate", "--data", str(tmp_path / "empty")]) == 1
    assert "28 missing" in capsys.readouterr().out
