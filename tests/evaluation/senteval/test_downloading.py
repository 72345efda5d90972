"""Fetching over real HTTP from a server on this machine: checked, and nothing extracted blindly."""

import pytest
from corpora import tar
from fileserver import file_server
from messages import all_of, says

from declutr.cli.main import main
from declutr.common.errors import RemoteError
from declutr.evaluation.senteval import data
from declutr.evaluation.senteval.data import download, fetch, git_sha1, known_hashes, sources, transfers
from declutr.evaluation.senteval.tasks import ALL_TASKS

TEXT = b"".join(b"%06d a line\n" % number for number in range(5000))


@pytest.fixture
def server():
    with file_server({"file": TEXT}) as served:
        yield served


def test_a_broken_connection_begins_again_and_the_third_break_ends_it(server, tmp_path):
    server.break_after = [10_000, 20_000]
    fetch(f"{server.address}/file", tmp_path / "there/file")
    assert (tmp_path / "there/file").read_bytes() == TEXT
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]
    server.break_after = [1000] * 3
    with pytest.raises(RemoteError, match=all_of("1,000 of 70,000 bytes", "same command")):
        fetch(f"{server.address}/file", tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_download_of_a_wrong_size_hash_or_address_leaves_nothing(server, tmp_path, monkeypatch):
    for address, expected, facts in (
        (f"{server.address}/nowhere", "", "404"),
        (f"{server.address}/file", "0000", ("SHA-1", "published file has 0000")),
        ("file:///etc/passwd", "", ("file:///etc/passwd", "http://")),
    ):
        with pytest.raises(RemoteError, match=all_of(facts)):
            fetch(address, tmp_path / "file", expected)
    assert not list(tmp_path.iterdir())
    (tmp_path / "right").write_bytes(TEXT)
    fetch(f"{server.address}/file", tmp_path / "file", git_sha1(tmp_path / "right"))
    assert (tmp_path / "file").read_bytes() == TEXT
    monkeypatch.setattr(data, "_MAX_BYTES", len(TEXT) - 1)
    with pytest.raises(RemoteError, match="69,999"):
        fetch(f"{server.address}/file", tmp_path / "other")


def test_a_file_must_have_its_published_hash(server, tmp_path, monkeypatch):
    path = "probing/past_present.txt"
    server.files[path] = TEXT
    (failed,) = download(tmp_path, ["Tense"], server.address)
    says(failed.note, "SHA-1", known_hashes()[path])
    assert not (tmp_path / path).exists()
    (tmp_path / "right").write_bytes(TEXT)
    monkeypatch.setitem(known_hashes(), path, git_sha1(tmp_path / "right"))
    assert download(tmp_path, ["Tense"], server.address)[0].outcome == "fetched"
    assert download(tmp_path, ["Tense"], server.address)[0].outcome == "kept"


def test_an_archive_is_read_as_a_stream_and_only_what_is_wanted_is_written(server, tmp_path):
    members = [
        ("../../escaped", b"x"),
        ("/absolute", b"x"),
        ("./deep/er/CR/custrev.pos", b"good\n"),
        ("CR/custrev.pos.bak", b"x"),
        ("xCR/custrev.neg", b"x"),
        ("MR/rt-polarity.neg", "SYMTYPE"),
        ("SUBJ/subj.objective", b"objective\n"),
    ]
    folder, names = tmp_path / "data", ["CR", "MR", "SUBJ"]
    (folder / "downstream/SUBJ").mkdir(parents=True)
    (folder / "downstream/SUBJ/subj.objective").write_bytes(b"mine\n")
    server.files["senteval.tar"] = tar(members)[:1500]  # broken: fetched again the next time
    assert {file.outcome for file in download(folder, names, server.address)} == {"kept", "failed"}
    server.files["senteval.tar"] = tar(members)
    outcomes = {file.path: file for file in download(folder, names, f"{server.address}/")}
    says(outcomes["downstream/CR/custrev.pos"].note, "copy", "known hash")
    says(outcomes["downstream/MR/rt-polarity.neg"].note, "not", "senteval.tar")
    assert outcomes["downstream/SUBJ/subj.objective"].outcome == "kept"
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"data/downstream/CR/custrev.pos": b"good\n", "data/downstream/SUBJ/subj.objective": b"mine\n"}
    shown = "\n".join(transfers(tuple(outcomes.values()), names))
    says(shown, "failed", "downstream/MR/rt-polarity.neg", "senteval.tar")


def test_the_public_table_covers_every_task_or_says_why_not():
    """Each path is one that a task reads, below the data folder, and each single file is pinned."""
    paths = {path for task in ALL_TASKS if task.name not in sources()["gone"] for path in task.paths}
    assert sources()["files"].keys() < paths <= known_hashes().keys()
    assert sources()["gone"].keys() == {"SNLI", "ImageCaptionRetrieval"}
    addresses = [*sources()["files"].values(), sources()["archive"]["url"]]
    assert all(address.startswith("https://") for address in addresses)


def test_download_command_counts_and_names_what_failed(server, tmp_path, capsys):
    """From a mirror that has one file: what was fetched, what failed, what cannot be had, and the check of it all."""
    server.files["senteval.tar"] = tar([("SUBJ/subj.objective", b"an objective line\n")])
    arguments = ["evaluate", "--download", str(tmp_path), "--mirror", server.address]
    assert main(arguments) == 1
    said = capsys.readouterr().out
    says(said, "1 fetched", "0 already present", "81 failed")
    assert "404" in said
    says(said, "ImageCaptionRetrieval", "pickles")
    assert "no subj.subjective" in said
    (tmp_path / "empty").mkdir()
    assert main(["evaluate", "--data", str(tmp_path / "empty")]) == 1
    assert "28 missing" in capsys.readouterr().out
