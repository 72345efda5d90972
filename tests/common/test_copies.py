"""`declutr copy`: nothing of a user is replaced, nothing hostile is written, whole or not there."""

import json
import os
import shutil

import pytest
from broken import contents
from mediafiles import spread
from messages import all_of, says
from volumes import small_volume

from declutr.cli.main import main as declutr
from declutr.common.errors import RemoteError
from declutr.common.storage import LISTING
from declutr.common.stores.copies import fetch_all, main
from declutr.common.stores.folder import Folder

HASTE = 0.3


@pytest.fixture
def sent(folder, tmp_path):
    """A folder and the address to which it was sent."""
    (folder / "a.bin").write_bytes(b"a" * 100)
    (folder / "deep/b").write_text("b")
    place = f"file://{tmp_path}/remote/data"
    Folder(place).send(folder)
    return folder, place


def test_what_was_removed_or_cut_at_the_address_is_sent_again(sent, tmp_path):
    remote = tmp_path / "remote/data"
    assert Folder(sent[1]).send(sent[0]) == 0
    (remote / "a.bin").write_bytes(b"a")
    (remote / "deep/b").unlink()
    assert Folder(sent[1]).send(sent[0]) == 2
    (remote / "deep/b").unlink()
    spread(remote, {"a.bin": b"a"})
    (remote / LISTING).unlink()  # as an interrupted transfer leaves it
    assert main([str(sent[0]), sent[1]]) == 0
    assert fetch_all(Folder(sent[1]), tmp_path / "copy") == len(contents(sent[0]))
    assert contents(tmp_path / "copy") == contents(sent[0])


OTHERS = {
    "no file": lambda here, _: (shutil.rmtree(here), here.mkdir()),
    "no common name": lambda here, _: (shutil.rmtree(here), spread(here, {"weights": b"b"})),
    "a common name": lambda here, _: (shutil.rmtree(here), spread(here, {"deep/b": b"b", "weights": b"b"})),
    "a changed file": lambda here, _: spread(here, {"deep/b": b"changed"}),
    "a file of no list": lambda _, there: ((there / LISTING).unlink(), spread(there, {"theirs": b"b"})),
    "other bytes and no list": lambda _, there: ((there / LISTING).unlink(), spread(there, {"deep/b": b"x"})),
    "other bytes of no list": lambda here, there: (spread(here, {"n": b"mine"}), spread(there, {"n": b"them"})),
    "the plan of another preparation": lambda here, there: (
        (there / LISTING).unlink(), spread(there, {"plan.json": b"1"}), spread(here, {"plan.json": b"2"})
    ),
}  # fmt: skip
"""Changes after which an address has what the folder has not."""


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_files_of_another_folder_at_the_address_are_kept(sent, tmp_path, change, capsys):
    change(sent[0], tmp_path / "remote/data")
    before = contents(tmp_path)
    assert main([str(sent[0]), sent[1]]) == 1
    says(capsys.readouterr().err, "files of another folder", "new address")
    assert contents(tmp_path) == before


STRANGERS = {
    "a file in a new folder": lambda copy: spread(copy, {"report/report.html": b"mine"}),
    "a hidden file": lambda copy: spread(copy, {".env": b"mine"}),
    "a changed file": lambda copy: spread(copy, {"deep/b": b"mine"}),
    "a file instead": lambda copy: (shutil.rmtree(copy), copy.write_text("mine")),
    "a dangling link and no file": lambda copy: (shutil.rmtree(copy / "deep"), (copy / "deep").symlink_to("no")),
}
"""Changes after which a folder is no whole copy."""


@pytest.mark.parametrize("change", STRANGERS.values(), ids=STRANGERS)
def test_copy_leaves_a_folder_with_other_files_as_it_is(sent, tmp_path, change, capsys):
    copy = tmp_path / "copy"
    copy.mkdir()  # an empty folder is nobody's
    assert fetch_all(Folder(sent[1]), copy) == len(contents(sent[0]))
    assert contents(copy) == contents(sent[0])
    assert fetch_all(Folder(sent[1]), copy) == 0, "the same files"
    change(copy)
    before = contents(tmp_path)
    assert main([sent[1], str(copy)]) == 1
    says(capsys.readouterr().err, "copy", "folder")
    assert contents(tmp_path) == before


NAMES = [
    "../x", "/etc/x", "a/../../x", "a//b", "", ".", "a/", "..\\x", "a\\b", "C:/x", "c:x", "a/D:", "x\0y", "a\nb",
    "\x1b[31m", "a.bin/b",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_that_leave_the_folder_are_refused_before_a_byte_is_written(sent, tmp_path, name):
    listing = tmp_path / "remote/data" / LISTING
    files = json.loads(listing.read_text())["files"]
    listing.write_text(json.dumps({"files": files | {name: {"sha256": "0", "num_bytes": 1}}}))
    for address, copy in ((sent[1], tmp_path / "copy"), (f"file://{tmp_path}/remote", tmp_path / "run")):
        with pytest.raises(RemoteError, match="outside the folder"):
            fetch_all(Folder(address, HASTE), copy)
        assert not copy.exists()
    with pytest.raises(RemoteError, match="outside the folder"):
        Folder(sent[1], HASTE).fetch_all({"a.bin": None, name: None}, tmp_path / "copy/in")
    assert not (tmp_path / "copy").exists()
    assert not [path for path in tmp_path.rglob(".*") if path.name.startswith((".copy", ".run"))]


KEYS = ["run/../x", "run//x", "run/./x", "run/a\\..\\..\\x", "run/C:\\x"]


@pytest.mark.parametrize("key", KEYS)
def test_keys_of_a_store_are_names_too(server, tmp_path, key):
    """Objects may have any key; those of a folder without a list are judged before the first is fetched."""
    import boto3

    bucket = f"hostile{KEYS.index(key)}"
    address = server("run", bucket=bucket)
    client = boto3.client("s3", endpoint_url=address.partition("endpoint_override=")[2])
    client.create_bucket(Bucket=bucket)
    for name in ("run/good", key):
        client.put_object(Bucket=bucket, Key=name, Body=b"x")
    with pytest.raises(RemoteError, match=all_of("run/good", "is a file; name its folder")):
        fetch_all(Folder(server("run/good", bucket=bucket), HASTE), tmp_path / "copy")
    with pytest.raises(RemoteError, match="outside the folder"):
        fetch_all(Folder(address, HASTE), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.usefixtures("sent")
def test_links_of_a_shared_folder_are_no_way_out(tmp_path):
    """Neither links nor pipes are followed; in a folder with a list nobody asks for them."""
    for name, make in (("link", lambda path: path.symlink_to(tmp_path / "local")), ("pipe", os.mkfifo)):
        make(tmp_path / "remote" / name)
        with pytest.raises(RemoteError, match=all_of("files", "folders")):
            fetch_all(Folder(f"file://{tmp_path}/remote", HASTE), tmp_path / "copy")
        (tmp_path / "remote" / name).unlink()
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("left_bytes", [0, 2**20])
def test_a_full_disk_of_this_host_is_no_outage_of_the_store(sent, tmp_path, capsys, left_bytes):
    (sent[0] / "large").write_bytes(os.urandom(2**21))
    Folder(sent[1]).send(sent[0])
    with small_volume(tmp_path / "disk", 4) as volume:
        volume.fill(left_bytes)
        assert main([sent[1], str(volume.path / "copy")]) == 1
        errors = capsys.readouterr().err
        assert "does not answer" not in errors
        says(errors, "this host", "No space left on device")
        assert not (volume.path / "copy").exists()
        volume.drain()
        assert main([sent[1], str(volume.path / "copy")]) == 0
        assert contents(volume.path / "copy") == contents(sent[0])


def test_push_names_what_it_does_not_send_and_refuses_what_pull_would_refuse(sent, capsys, tmp_path):
    os.mkfifo(sent[0] / "fifo")
    (sent[0] / "loop").symlink_to(".")
    (sent[0] / "gone").symlink_to("nowhere")
    assert main([str(sent[0]), sent[1]]) == 0
    errors = capsys.readouterr().err
    for name in ("fifo", "gone", "loop"):
        says(errors, f"{name} is not sent")
    assert "a.bin is" not in errors
    (sent[0] / "a\\b").write_text("x")
    assert main([str(sent[0]), f"file://{tmp_path}/there"]) == 1
    assert not (tmp_path / "there").exists()


def test_an_unfinished_preparation_is_not_fetched(tmp_path, capsys):
    """Its first file is plan.json; the list of a finished output, which names all files, is the last."""
    folder = tmp_path / "remote/out"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / "train-0.arrow").write_bytes(b"x")
    assert main([f"file://{folder}", str(tmp_path / "copy")]) == 1
    says(capsys.readouterr().err, "unfinished preparation", "not sent by")
    assert not (tmp_path / "copy").exists()
    Folder(f"file://{tmp_path}/remote/whole").send(folder)
    assert main([f"file://{tmp_path}/remote/whole", str(tmp_path / "copy")]) == 0
    assert (tmp_path / "copy/plan.json").is_file()


def test_a_second_copy_of_files_in_no_list_compares_their_bytes_and_a_mount_point_is_refused(
    sent, tmp_path, capsys, monkeypatch
):
    """As of a run: its settings and metrics are in no list, its checkpoints are."""
    (tmp_path / "remote/metrics.jsonl").write_text("1")
    run, copy = Folder(f"file://{tmp_path}/remote"), tmp_path / "copy"
    assert fetch_all(run, copy) == 1 + len(contents(sent[0]))
    whole = contents(copy)
    assert fetch_all(run, copy) == 0
    (tmp_path / "remote/metrics.jsonl").write_text("2")
    with pytest.raises(RemoteError, match="no whole copy"):
        fetch_all(run, copy)
    assert contents(copy) == whole
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".", "tmp"))) == []
    monkeypatch.setattr("pathlib.Path.is_mount", lambda path: path.name == "mounted")
    (tmp_path / "mounted").mkdir()
    assert main([sent[1], str(tmp_path / "mounted")]) == 1
    says(capsys.readouterr().err, "mount point", "folder in it")


def test_copy_counts_files_and_bytes_and_needs_a_direction(sent, tmp_path, capsys):
    folder, url = sent[0], f"file://{tmp_path}/there"
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    whole = f"{sum(sizes) / 2**20:.1f} MiB in {len(sizes)} files"
    for source, target, logged in ((folder, url, whole), (url, tmp_path / "back", f"{len(sizes)} files")):
        assert main([str(source), str(target)]) == 0
        out, err = capsys.readouterr()
        says(out, target, whole, f"{len(sizes)} of them")
        says(err, logged, url)
        assert main([str(source), str(target)]) == 0
        assert capsys.readouterr().out.count(", 0 of them") == 1
    assert contents(tmp_path / "back") == contents(folder)
    assert main([f"{url}/nothing", str(tmp_path / "none")]) == 1
    assert main([str(tmp_path / "none"), url]) == 1
    says(capsys.readouterr().err, "not a folder")
    assert main([str(folder), f"file://{folder}/deep/in"]) == 1
    says(capsys.readouterr().err, "which would be copied into itself; name a folder elsewhere")
    assert declutr(["copy", "here", "there"]) == declutr(["copy", "s3://bucket/a", "gs://bucket/b"]) == 1
    errors = capsys.readouterr().err
    says(errors, "neither is an address", "cp -r")
    says(errors, "both are addresses", "copy to a folder")
