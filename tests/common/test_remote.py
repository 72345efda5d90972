"""Folders in object stores, on an S3 server of this machine and on a plain folder: whole or not there, and patient."""

import json
import os
import signal
import threading
import time

import pytest
from messages import all_of, says
from s3server import s3_server

from declutr.common.stores.address import child, filesystem
from declutr.common.stores.copies import LISTING, pull_all
from declutr.common.stores.files import names, pull_file, push_file, read_file, remove_file, write_file
from declutr.common.stores.folders import is_whole, local_copy, main, pull_folder, push_folder, remove_folder
from declutr.common.stores.retry import RemoteError, RetryPolicy, explained

HASTE = RetryPolicy(total_seconds=0.3, first_seconds=0.05)
SMALL = bytes(range(256))
LARGE = SMALL * (11 * 4096)  # 11 MiB: more than one part of an upload, more than one chunk of a download


@pytest.fixture(scope="module")
def server():
    with s3_server() as address:
        yield address


@pytest.fixture(params=["s3", "file"])
def place(request, tmp_path):
    """Address of a folder that does not exist yet."""
    if request.param == "file":
        return f"file://{tmp_path}/remote/run"
    return request.getfixturevalue("server")(f"{request.node.name}/run")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "local"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.bin").write_bytes(SMALL)
    (folder / "deep" / "b c.txt").write_text("b")
    (folder / "empty").write_bytes(b"")
    return folder


def test_upload_that_is_interrupted_leaves_no_object(server, tmp_path):
    """Its first part has been sent, and the object would look complete."""
    address, slow = server("interrupted/a.bin"), tmp_path / "slow"
    os.mkfifo(slow)

    def feed():
        with slow.open("wb") as stream:
            stream.write(LARGE)
            while not released.wait(0.05):  # one that comes before it waits for more would end it when the file ends
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def once(*_):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    released, feeder = threading.Event(), threading.Thread(target=feed)
    before = signal.signal(signal.SIGINT, once)
    feeder.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            push_file(slow, address)
    finally:
        signal.signal(signal.SIGINT, before)
        released.set()
        feeder.join()
    assert read_file(address) is None


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def overwrite(place, name, data):
    files, path, _ = filesystem(child(place, name))
    files.pipe_file(path, data)


def test_a_folder_comes_back_as_it_was_sent(place, folder, tmp_path):
    assert names(place) == []
    assert not is_whole(place)
    (folder / "a.bin").write_bytes(LARGE)
    push_folder(folder, place)
    assert is_whole(place)
    assert names(place) == [LISTING, "a.bin", "deep", "empty"]
    pull_folder(place, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == [".back.lock"]

    (folder / "deep" / "b c.txt").write_text("changed")
    (folder / "empty").unlink()
    push_folder(folder, place)
    pull_folder(place, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder)
    assert "empty" not in names(place)
    remove_folder(place)
    remove_folder(place)
    assert names(place) == []


def test_push_of_files_already_there_sends_nothing(place, folder):
    push_folder(folder, place)
    overwrite(place, "a.bin", b"a trace")
    push_folder(folder, place)  # the same list: nothing to do
    (folder / "empty").write_text("no longer")
    push_folder(folder, place)
    files, path, _ = filesystem(place)
    assert files.cat_file(f"{path}/a.bin") == b"a trace"


@pytest.mark.parametrize(
    ("name", "data", "wrong"),
    [
        ("a.bin", SMALL[:-1], ("a.bin", "truncated", "altered")),
        ("a.bin", SMALL[:-1] + b"x", ("a.bin", "truncated", "altered")),
        (LISTING, b"{", "list of files"),
        (LISTING, json.dumps({"files": {"../x": {"sha256": "0", "num_bytes": 1}}}).encode(), "outside"),
        (LISTING, json.dumps({"files": {"/etc/x": {"sha256": "0", "num_bytes": 1}}}).encode(), "outside"),
        (
            LISTING,
            json.dumps({"files": {"gone": {"sha256": "0", "num_bytes": 1}}}).encode(),
            "gone",
        ),
    ],
)
def test_remote_folder_that_is_not_whole_is_refused(place, folder, tmp_path, name, data, wrong):
    push_folder(folder, place)
    overwrite(place, name, data)
    with pytest.raises(RemoteError, match=all_of(wrong)):
        pull_folder(place, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert {path.name for path in tmp_path.glob(".back*")} <= {".back.lock"}


def test_a_half_sent_folder_is_not_there(place, folder, tmp_path):
    push_file(folder / "a.bin", child(place, "a.bin"))
    assert not is_whole(place)
    with pytest.raises(FileNotFoundError, match="no complete folder"):
        pull_folder(place, tmp_path / "back")


def test_many_that_ask_at_once_fetch_once(place, folder, tmp_path):
    push_folder(folder, place)
    threads = [threading.Thread(target=pull_folder, args=(place, tmp_path / "back")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(tmp_path / "back") == contents(folder)


def test_a_copy_is_fetched_once_and_another_content_is_another_copy(place, folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="no complete folder"):
        local_copy(place, tmp_path / "cache")
    push_folder(folder, place)
    first = local_copy(place, tmp_path / "cache")
    (first / "a.bin").write_bytes(b"a trace")
    assert local_copy(place, tmp_path / "cache") == first
    assert (first / "a.bin").read_bytes() == b"a trace"
    (folder / "a.bin").write_bytes(b"changed")
    push_folder(folder, place)
    second = local_copy(place, tmp_path / "cache")
    assert second != first
    assert contents(second) == contents(folder)


def test_copy_that_differs_is_replaced_on_request(place, folder, tmp_path):
    push_folder(folder, place)
    pull_folder(place, tmp_path / "back")
    inode = (tmp_path / "back" / "a.bin").stat().st_ino
    pull_folder(place, tmp_path / "back", renew=True)
    assert (tmp_path / "back" / "a.bin").stat().st_ino == inode
    (tmp_path / "back" / "empty").write_text("no longer")
    pull_folder(place, tmp_path / "back")
    assert (tmp_path / "back" / "empty").read_text() == "no longer"
    pull_folder(place, tmp_path / "back", renew=True)
    assert contents(tmp_path / "back") == contents(folder)


def test_files_and_what_has_no_list_of_its_own(place, folder, tmp_path):
    push_folder(folder, child(place, "whole"))
    write_file(child(place, "note"), b"1")
    write_file(child(place, "loose/note"), b"2")
    assert read_file(child(place, "note")) == b"1"
    assert read_file(child(place, "nothing")) is None
    assert pull_file(child(place, "note"), tmp_path / "note")
    assert (tmp_path / "note").read_bytes() == b"1"
    assert not pull_file(child(place, "nothing"), tmp_path / "note")
    for _ in range(2):
        pull_all(place, tmp_path / "all")
        found = {name for name in contents(tmp_path / "all") if not name.endswith(".lock")}
        assert found == {"note", "loose/note", "whole/a.bin", "whole/deep/b c.txt", "whole/empty"}
        write_file(child(place, "note"), b"3")
    assert (tmp_path / "all" / "note").read_bytes() == b"3"
    remove_file(child(place, "note"))
    remove_file(child(place, "note"))
    assert names(place) == ["loose", "whole"]


def test_a_bucket_that_is_not_there_is_told_at_once(server, folder):
    began = time.monotonic()
    with pytest.raises(RemoteError, match="bucket"):
        push_folder(folder, server("run", bucket="no-such-bucket"))
    assert time.monotonic() - began < 30
    with pytest.raises(RemoteError, match="nosuch"):
        push_folder(folder, "nosuch://x/y", HASTE)


def test_an_outage_is_waited_for_and_told_once(folder, tmp_path, log):
    """A place whose folder is a file at first, so that everything in it fails."""
    gate = tmp_path / "gate"
    gate.write_text("in the way")
    with pytest.raises(RemoteError, match=all_of("answered", "0 s")):
        push_folder(folder, f"file://{gate}/run", HASTE)

    log.clear()
    opening = threading.Timer(0.5, gate.unlink)
    opening.start()
    push_folder(folder, f"file://{gate}/run", RetryPolicy(60, first_seconds=0.05))
    opening.join()
    assert ["does not answer" in line for line in log] == [True, False]
    assert "answers again" in log[1]
    pull_folder(f"file://{gate}/run", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)


def test_push_and_pull_count_files_and_bytes(folder, tmp_path, capsys):
    url = f"file://{tmp_path}/there"
    assert main(["push", str(folder), url]) == 0
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    whole = f"{sum(sizes) / 2**20:.1f} MiB in {len(sizes)} files"
    shown = capsys.readouterr()
    says(shown.out, url, whole, f"{len(sizes)} of them")
    says(shown.err, whole, url)
    assert main(["push", str(folder), url]) == 0
    assert capsys.readouterr().out.count(", 0 of them") == 1
    assert main(["pull", url, str(tmp_path / "back")]) == 0
    assert contents(tmp_path / "back") == contents(folder)
    shown = capsys.readouterr()
    says(shown.out, f"{tmp_path}/back", whole, f"{len(sizes)} of them")
    says(shown.err, f"{len(sizes)} of {len(sizes)} files", url)
    assert main(["pull", url, str(tmp_path / "back")]) == 0
    assert capsys.readouterr().out.count(", 0 of them") == 1
    assert main(["pull", f"{url}/nothing", str(tmp_path / "none")]) == 1
    assert main(["push", str(tmp_path / "none"), url]) == 1
    says(capsys.readouterr().err, "not a folder")


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (
            "When resolving region for bucket 'b': AWS Error NETWORK_CONNECTION during HeadBucket operation: curlCode: "
            "6, Could not resolve hostname; Details: Could not resolve host: b.s3.us-east-1.amazonaws.com",
            (
                "HeadBucket",
                "NETWORK_CONNECTION",
                "Could not resolve host: b.s3.us-east-1.amazonaws.com",
                "check the network",
            ),
        ),
        (
            "For key x: AWS Error ACCESS_DENIED during HeadObject operation: No response body.",
            ("HeadObject", "ACCESS_DENIED", "credentials"),
        ),
        ("google " * 100, "google google"),
        ("s3://key:secret@bucket is not there", "s3://***@bucket is not there"),
    ],
)
def test_errors_of_stores_are_short_and_have_a_remedy(raw, told):
    message = explained(OSError(raw))
    says(message, told)
    assert len(message) < 310
