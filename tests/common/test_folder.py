"""Folders here and in stores: whole or not there, through outages and refusals."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from broken import contents
from messages import all_of, says
from s3server import faulty_store

from declutr.common.errors import RemoteError
from declutr.common.storage import LISTING
from declutr.common.stores.address import RETRY_SECONDS, explained
from declutr.common.stores.copies import fetch_all
from declutr.common.stores.folder import Folder

HASTE, ONCE = 0.3, 0.0
SMALL = bytes(range(256))
LARGE = SMALL * (11 * 4096)  # 11 MiB: more than one part of an upload, more than one chunk of a download


@pytest.fixture(params=["s3", "file"])
def place(request, tmp_path):
    """A remote folder that does not exist yet."""
    if request.param == "file":
        return Folder(f"file://{tmp_path}/remote/run")
    return Folder(request.getfixturevalue("server")(f"{request.node.name}/run"))


def test_upload_that_is_interrupted_leaves_no_object(server, tmp_path):
    """Its first part has been sent, and the object would look complete."""
    remote, slow = Folder(server("interrupted")), tmp_path / "slow"
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
            remote.put("a.bin", slow)
    finally:
        signal.signal(signal.SIGINT, before)
        released.set()
        feeder.join()
    assert remote.read("a.bin") is None


def test_a_folder_comes_back_as_it_was_sent(place, folder, tmp_path):
    assert (place.names(), place.is_whole()) == ([], False)
    (folder / "a.bin").write_bytes(LARGE)
    place.send(folder)
    assert (place.names(), place.is_whole()) == ([LISTING, "a.bin", "deep", "empty"], True)
    place.get(tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == [".back.lock"]

    (folder / "deep" / "b c.txt").write_text("changed")
    (folder / "empty").unlink()
    place.send(folder)
    place.get(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder)
    assert "empty" not in place.names()
    trace = b"t" * len(LARGE)  # of the size in the list
    place.put("a.bin", trace)
    for text in ("changed", "again"):  # the same list, and a list with one other file
        (folder / "deep" / "b c.txt").write_text(text)
        place.send(folder)
        assert place.read("a.bin") == trace
    place.clear()
    place.clear()
    assert place.names() == []


LISTED = '{"files": {"%s": {"sha256": "0", "num_bytes": 1}}}'


@pytest.mark.parametrize(
    ("name", "data", "wrong"),
    [
        ("a.bin", SMALL[:-1], ("a.bin", "truncated", "altered")),
        ("a.bin", SMALL[:-1] + b"x", ("a.bin", "truncated", "altered")),
        (LISTING, b"{", "list of files"),
        *[(LISTING, (LISTED % name).encode(), cause) for name, cause in (("../x", "outside"), ("gone", "gone"))],
    ],
)
def test_remote_folder_that_is_not_whole_is_refused(place, folder, tmp_path, name, data, wrong):
    place.send(folder)
    place.put(name, data)
    with pytest.raises(RemoteError, match=all_of(wrong)):
        place.get(tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert {path.name for path in tmp_path.glob(".back*")} <= {".back.lock"}


def test_a_half_sent_folder_is_not_there_and_a_copy_of_a_whole_one_is_replaced_on_request(place, folder, tmp_path):
    place.put("a.bin", folder / "a.bin")
    assert not place.is_whole()
    for fetch in (place.get, place.cached):
        with pytest.raises(FileNotFoundError, match="no complete folder"):
            fetch(tmp_path / "nothing")
    place.send(folder)
    cache, back = tmp_path / "cache", tmp_path / "back"
    first = place.cached(cache)
    (first / "a.bin").write_bytes(b"a trace")
    assert place.cached(cache) == first
    assert (first / "a.bin").read_bytes() == b"a trace"
    (folder / "a.bin").write_bytes(b"changed")
    place.send(folder)
    assert place.cached(cache) != first
    assert contents(place.cached(cache)) == contents(folder)
    place.get(back)
    inode = (back / "a.bin").stat().st_ino
    place.get(back, renew=True)
    assert (back / "a.bin").stat().st_ino == inode
    (back / "empty").write_text("no longer")
    place.get(back)
    assert (back / "empty").read_text() == "no longer"
    place.get(back, renew=True)
    assert contents(back) == contents(folder)


def test_many_that_ask_at_once_fetch_once(place, folder, tmp_path, monkeypatch):
    place.send(folder)
    fetches, fetch_all_files = [], Folder.fetch_all

    def counted(self, files, target):
        fetches.append(target)
        time.sleep(0.2)  # the others ask
        return fetch_all_files(self, files, target)

    monkeypatch.setattr(Folder, "fetch_all", counted)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(place.get, [tmp_path / "back"] * 4))
    assert contents(tmp_path / "back") == contents(folder)
    assert len(fetches) == 1


def test_files_and_what_has_no_list_of_its_own(place, folder, tmp_path):
    (place / "whole").send(folder)
    place.put("note", b"1")
    place.put("loose/note", b"2")
    assert (place.read("note"), place.read("nothing")) == (b"1", None)
    assert [place.pull(name, tmp_path / "note") for name in ("note", "nothing")] == [True, False]
    assert (tmp_path / "note").read_bytes() == b"1"
    fetch_all(place, tmp_path / "all")
    whole = {f"whole/{name}": content for name, content in contents(folder).items()}
    assert contents(tmp_path / "all") == {"note": b"1", "loose/note": b"2"} | whole
    place.delete("note")
    place.delete("note")
    assert place.names() == ["loose", "whole"]


def test_a_bucket_that_is_not_there_is_told_at_once(server, folder):
    began = time.monotonic()
    with pytest.raises(RemoteError, match="bucket"):
        Folder(server("run", bucket="no-such-bucket")).send(folder)
    assert time.monotonic() - began < 30
    with pytest.raises(RemoteError, match="nosuch"):
        Folder("nosuch://x/y", HASTE).send(folder)


def test_an_outage_is_waited_for_and_told_once(folder, tmp_path, log, monkeypatch):
    """A place whose folder is a file at first, so that everything in it fails."""
    monkeypatch.setattr("declutr.common.stores.address._FIRST_WAIT_SECONDS", 0.05)
    gate = tmp_path / "gate"
    gate.write_text("in the way")
    with pytest.raises(RemoteError, match=all_of("answered", "0 s")):
        Folder(f"file://{gate}/run", HASTE).send(folder)

    log.clear()
    opening = threading.Timer(0.5, gate.unlink)
    opening.start()
    Folder(f"file://{gate}/run", 60).send(folder)
    opening.join()
    assert ["does not answer" in line for line in log] == [True, False]
    assert "answers again" in log[1]
    Folder(f"file://{gate}/run").get(tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)


UNRESOLVED = "When resolving region for bucket 'b': AWS Error NETWORK_CONNECTION during HeadBucket operation: "
UNRESOLVED += "curlCode: 6, Could not resolve hostname; Details: Could not resolve host: b.s3.us-east-1.amazonaws.com"


@pytest.mark.parametrize(
    ("raw", "facts"),
    [
        (UNRESOLVED, ("HeadBucket", "NETWORK_CONNECTION", "host: b.s3.us-east-1.amazonaws.com", "check the network")),
        ("google " * 100, "google google"),
        ("s3://key:secret@bucket is not there", "s3://***@bucket is not there"),
    ],
)
def test_errors_of_stores_are_short_and_have_a_remedy(raw, facts):
    says(explained(OSError(raw)), facts)
    assert len(explained(OSError(raw))) < 310


@pytest.fixture(scope="module")
def store():
    with faulty_store() as (address, faults):
        yield lambda name, retry_seconds=RETRY_SECONDS: Folder(address(name), retry_seconds), faults


@pytest.mark.slow
def test_throttling_and_short_answers_are_waited_out(store, folder, tmp_path):
    remote, faults = store
    (folder / "a.bin").write_bytes(LARGE)
    faults.refuse(503, "SlowDown", left=12)
    remote("throttled").send(folder)
    assert faults.left == 0
    faults.truncate(left=3)
    remote("throttled").get(tmp_path / "back")
    assert faults.left == 0
    assert contents(tmp_path / "back") == contents(folder)
    faults.clear()


def test_an_upload_that_breaks_off_is_taken_up_again(store, folder):
    remote, faults = store
    (folder / "a.bin").write_bytes(LARGE)
    faults.refuse(400, "InvalidPart", methods=("POST",), left=1)
    with pytest.raises(RemoteError, match=r"a\.bin"):
        remote("broken", ONCE).send(folder)
    faults.clear()
    assert not remote("broken").is_whole()
    remote("broken").send(folder)
    assert remote("broken").is_whole()


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (400, "ExpiredToken", ("refuses", "credentials", "expired", "renew")),
        (403, "AccessDenied", ("refuses", "credentials", "permissions")),
        (507, "XMinioStorageFull", ("full", "free")),
        (403, "QuotaExceeded", "quota"),
    ],
)
def test_an_error_names_its_cause_and_the_remedy(store, status, code, remedy):
    remote, faults = store
    remote("files").put("kept", b"before")
    faults.refuse(status, code)
    with pytest.raises(RemoteError, match=all_of(remedy)):
        remote("files", ONCE).put("kept", b"after")
    if code == "ExpiredToken":  # no answer to HEAD has a body with the store's code; waiting ten minutes does not help
        faults.refuse(status, code, methods=("HEAD",))
        with pytest.raises(RemoteError, match=all_of(remedy)):
            remote("files").read("kept")
    faults.clear()
    assert remote("files").read("kept") == b"before"
