"""Folders here and in stores, and `declutr copy`: whole or not there, through outages, refusals and hostile names."""

import json
import os
import signal
import threading
import time

import pytest
from faultystore import faulty_store
from messages import all_of, says
from s3server import s3_server
from volumes import small_volume
from waiting import until

from declutr.cli.main import main as declutr
from declutr.common.errors import RemoteError
from declutr.common.storage import LISTING
from declutr.common.stores.address import explained
from declutr.common.stores.copies import fetch_all, main
from declutr.common.stores.folder import DEFAULT_RETRIES, Folder, RetryPolicy

HASTE = RetryPolicy(total_seconds=0.3, first_seconds=0.05)
ONCE = RetryPolicy(total_seconds=0.0)
SMALL = bytes(range(256))
LARGE = SMALL * (11 * 4096)  # 11 MiB: more than one part of an upload, more than one chunk of a download


@pytest.fixture(scope="module")
def server():
    with s3_server() as address:
        yield address


@pytest.fixture(params=["s3", "file"])
def place(request, tmp_path):
    """A remote folder that does not exist yet."""
    if request.param == "file":
        return Folder(f"file://{tmp_path}/remote/run")
    return Folder(request.getfixturevalue("server")(f"{request.node.name}/run"))


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
    assert place.names() == []
    assert not place.is_whole()
    (folder / "a.bin").write_bytes(LARGE)
    place.send(folder)
    assert place.is_whole()
    assert place.names() == [LISTING, "a.bin", "deep", "empty"]
    place.get(tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == [".back.lock"]

    (folder / "deep" / "b c.txt").write_text("changed")
    (folder / "empty").unlink()
    place.send(folder)
    place.get(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder)
    assert "empty" not in place.names()
    place.clear()
    place.clear()
    assert place.names() == []


def test_push_of_files_already_there_sends_nothing(place, folder):
    place.send(folder)
    place.put("a.bin", b"a trace")
    place.send(folder)  # the same list: nothing to do
    (folder / "empty").write_text("no longer")
    place.send(folder)
    assert place.read("a.bin") == b"a trace"


@pytest.mark.parametrize(
    ("name", "data", "wrong"),
    [
        ("a.bin", SMALL[:-1], ("a.bin", "truncated", "altered")),
        ("a.bin", SMALL[:-1] + b"x", ("a.bin", "truncated", "altered")),
        (LISTING, b"{", "list of files"),
        (LISTING, json.dumps({"files": {"../x": {"sha256": "0", "num_bytes": 1}}}).encode(), "outside"),
        (LISTING, json.dumps({"files": {"/etc/x": {"sha256": "0", "num_bytes": 1}}}).encode(), "outside"),
        (LISTING, json.dumps({"files": {"gone": {"sha256": "0", "num_bytes": 1}}}).encode(), "gone"),
    ],
)
def test_remote_folder_that_is_not_whole_is_refused(place, folder, tmp_path, name, data, wrong):
    place.send(folder)
    place.put(name, data)
    with pytest.raises(RemoteError, match=all_of(wrong)):
        place.get(tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert {path.name for path in tmp_path.glob(".back*")} <= {".back.lock"}


def test_a_half_sent_folder_is_not_there_and_a_copy_of_a_whole_one_is_fetched_once(place, folder, tmp_path):
    place.put("a.bin", folder / "a.bin")
    assert not place.is_whole()
    with pytest.raises(FileNotFoundError, match="no complete folder"):
        place.get(tmp_path / "back")
    with pytest.raises(FileNotFoundError, match="no complete folder"):
        place.cached(tmp_path / "cache")
    place.send(folder)
    first = place.cached(tmp_path / "cache")
    (first / "a.bin").write_bytes(b"a trace")
    assert place.cached(tmp_path / "cache") == first
    assert (first / "a.bin").read_bytes() == b"a trace"
    (folder / "a.bin").write_bytes(b"changed")
    place.send(folder)
    second = place.cached(tmp_path / "cache")
    assert second != first
    assert contents(second) == contents(folder)


def test_many_that_ask_at_once_fetch_once(place, folder, tmp_path):
    place.send(folder)
    threads = [threading.Thread(target=place.get, args=(tmp_path / "back",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(tmp_path / "back") == contents(folder)


def test_copy_that_differs_is_replaced_on_request(place, folder, tmp_path):
    place.send(folder)
    place.get(tmp_path / "back")
    inode = (tmp_path / "back" / "a.bin").stat().st_ino
    place.get(tmp_path / "back", renew=True)
    assert (tmp_path / "back" / "a.bin").stat().st_ino == inode
    (tmp_path / "back" / "empty").write_text("no longer")
    place.get(tmp_path / "back")
    assert (tmp_path / "back" / "empty").read_text() == "no longer"
    place.get(tmp_path / "back", renew=True)
    assert contents(tmp_path / "back") == contents(folder)


def test_files_and_what_has_no_list_of_its_own(place, folder, tmp_path):
    (place / "whole").send(folder)
    place.put("note", b"1")
    place.put("loose/note", b"2")
    assert place.read("note") == b"1"
    assert place.read("nothing") is None
    assert place.pull("note", tmp_path / "note")
    assert (tmp_path / "note").read_bytes() == b"1"
    assert not place.pull("nothing", tmp_path / "note")
    for _ in range(2):
        fetch_all(place, tmp_path / "all")
        fetched = {name for name in contents(tmp_path / "all") if not name.endswith(".lock")}
        assert fetched == {"note", "loose/note", "whole/a.bin", "whole/deep/b c.txt", "whole/empty"}
        place.put("note", b"3")
    assert (tmp_path / "all" / "note").read_bytes() == b"3"
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


def test_an_outage_is_waited_for_and_told_once(folder, tmp_path, log):
    """A place whose folder is a file at first, so that everything in it fails."""
    gate = tmp_path / "gate"
    gate.write_text("in the way")
    with pytest.raises(RemoteError, match=all_of("answered", "0 s")):
        Folder(f"file://{gate}/run", HASTE).send(folder)

    log.clear()
    opening = threading.Timer(0.5, gate.unlink)
    opening.start()
    Folder(f"file://{gate}/run", RetryPolicy(60, first_seconds=0.05)).send(folder)
    opening.join()
    assert ["does not answer" in line for line in log] == [True, False]
    assert "answers again" in log[1]
    Folder(f"file://{gate}/run").get(tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (
            "When resolving region for bucket 'b': AWS Error NETWORK_CONNECTION during HeadBucket operation: curlCode: "
            "6, Could not resolve hostname; Details: Could not resolve host: b.s3.us-east-1.amazonaws.com",
            ("HeadBucket", "NETWORK_CONNECTION", "host: b.s3.us-east-1.amazonaws.com", "check the network"),
        ),
        (
            "For key x: AWS Error ACCESS_DENIED during HeadObject operation: No response body.",
            ("HeadObject", "ACCESS_DENIED", "credentials"),
        ),
        ("google " * 100, "google google"),
        ("s3://key:secret@bucket is not there", "s3://***@bucket is not there"),
    ],
)
def test_errors_of_stores_are_short_and_have_a_remedy(raw, shown):
    message = explained(OSError(raw))
    says(message, shown)
    assert len(message) < 310


@pytest.fixture(scope="module")
def store():
    with faulty_store() as (address, faults):
        yield lambda name, retries=DEFAULT_RETRIES: Folder(address(name), retries), faults


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


def test_an_upload_that_breaks_off_is_taken_up_again_and_expired_credentials_are_a_refusal(store, folder):
    remote, faults = store
    (folder / "a.bin").write_bytes(LARGE)
    faults.refuse(400, "InvalidPart", methods=("POST",), left=1)
    with pytest.raises(RemoteError, match=r"a\.bin"):
        remote("broken", ONCE).send(folder)
    faults.clear()
    assert not remote("broken").is_whole()
    remote("broken").send(folder)
    assert remote("broken").is_whole()
    # An answer to HEAD has no body, so the store's own code is missing; waiting ten minutes would not help.
    remote, faults = store
    remote("there").put("x", b"x")
    faults.refuse(400, "ExpiredToken", methods=("HEAD",))
    with pytest.raises(RemoteError, match=all_of("refuses", "credentials", "expired", "renew")):
        remote("there").read("x")
    faults.clear()


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
    faults.clear()
    assert remote("files").read("kept") == b"before"


@pytest.fixture
def sent(folder, tmp_path):
    """A folder that was sent, and its address."""
    (folder / "a.bin").write_bytes(b"a" * 100)
    (folder / "deep/b").write_text("b")
    place = f"file://{tmp_path}/remote/data"
    Folder(place).send(folder)
    return folder, place


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def strangers(folder):
    """Changes after which a folder holds something that `copy` did not fetch."""

    def write(name, text="mine"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return {
        "a file beside": lambda: write("thesis.txt"),
        "a file in a new folder": lambda: write("report/report.html"),
        "a hidden file": lambda: write(".env"),
        "a changed file": lambda: write("deep/b", "edited"),
        "a link": lambda: (folder / "link").symlink_to("/etc"),
        "a dangling link": lambda: (folder / "link").symlink_to("nowhere"),
        "a pipe": lambda: os.mkfifo(folder / "pipe"),
    }


@pytest.mark.parametrize("change", strangers(None))
def test_pull_leaves_foreign_files(sent, tmp_path, change, capsys):
    _, place = sent
    copy = tmp_path / "copy"
    fetch_all(Folder(place), copy)
    strangers(copy)[change]()
    before = contents(copy)
    (sent[0] / "a.bin").write_bytes(b"changed")
    Folder(place).send(sent[0])
    assert main([place, str(copy)]) == 1
    says(capsys.readouterr().err, "`declutr copy`", "changed")
    assert contents(copy) == before
    assert not list(tmp_path.glob(".copy*.tmp"))


@pytest.mark.parametrize("kind", ["folder", "file", "mount", "parent"])
def test_a_place_that_is_no_copy_is_refused(sent, tmp_path, kind, capsys):
    """The folder of someone's documents; a file; a mount; the folder in which the store itself is."""
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents/thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("mine")
    place = {"folder": tmp_path / "documents", "file": tmp_path / "file", "mount": "/proc", "parent": tmp_path}[kind]
    before = contents(tmp_path)
    assert main([sent[1], str(place)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert {name: value for name, value in contents(tmp_path).items() if not name.endswith(".lock")} == before


def test_an_unchanged_copy_gives_way_and_keeps_what_is_the_same(sent, tmp_path):
    folder, place = sent
    copy = tmp_path / "copy"
    copy.mkdir()  # an empty folder is nobody's
    fetch_all(Folder(place), copy)
    inode = (copy / "deep/b").stat().st_ino
    (folder / "a.bin").write_bytes(b"changed")
    (folder / "new").write_text("new")
    Folder(place).send(folder)
    fetch_all(Folder(place), copy)
    assert contents(copy) == contents(folder)
    assert (copy / "deep/b").stat().st_ino == inode
    (tmp_path / "link").symlink_to(copy)
    (folder / "new").unlink()
    Folder(place).send(folder)
    fetch_all(Folder(place), tmp_path / "link")
    assert contents(copy) == contents(folder)
    assert (tmp_path / "link").is_symlink()
    (copy / "a.bin").unlink()  # nothing is lost by fetching it again
    fetch_all(Folder(place), copy)
    assert contents(copy) == contents(folder)


@pytest.mark.parametrize("damage", ["altered", "missing", "list", "gone"])
def test_a_damaged_store_leaves_the_copy_of_before(sent, tmp_path, damage):
    folder, place = sent
    copy = tmp_path / "copy"
    fetch_all(Folder(place), copy)
    before = contents(copy)
    (folder / "a.bin").write_bytes(b"changed")
    Folder(place).send(folder)
    remote = tmp_path / "remote/data"
    if damage == "altered":
        (remote / "a.bin").write_bytes(b"half")
    elif damage == "missing":
        (remote / "a.bin").unlink()
    elif damage == "list":
        (remote / LISTING).write_bytes((remote / LISTING).read_bytes()[:20])
    else:
        (tmp_path / "remote/data").rename(tmp_path / "remote/elsewhere")
    with pytest.raises(OSError, match=r"altered|missing|No such|not a list|nothing found"):
        fetch_all(Folder(place, HASTE), copy)
    assert contents(copy) == before
    assert not list(tmp_path.glob(".copy*.tmp"))


NAMES = [
    "../x", "/etc/x", "a/../../x", "a//b", "", ".", "a/", "..\\x", "a\\b", "C:/x", "c:x", "a/D:", "x\0y", "a\nb",
    "\x1b[31m", "a.bin/b",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_that_leave_the_folder_are_refused_before_a_byte_is_written(sent, tmp_path, name):
    _, place = sent
    listing = tmp_path / "remote/data" / LISTING
    files = json.loads(listing.read_text())["files"]
    listing.write_text(json.dumps({"files": files | {name: {"sha256": "0", "num_bytes": 1}}}))
    for address, copy in ((place, tmp_path / "copy"), (f"file://{tmp_path}/remote", tmp_path / "run")):
        with pytest.raises(RemoteError, match="outside the folder"):
            fetch_all(Folder(address, HASTE), copy)
        assert not copy.exists()
    assert not [path for path in tmp_path.rglob(".*") if path.name.startswith((".copy", ".run"))]


@pytest.mark.parametrize("key", ["run/../x", "run//x", "run/./x", "run/a\\..\\..\\x", "run/C:\\x"])
def test_keys_of_a_store_are_names_too(server, tmp_path, key):
    """Objects may have any key; those of a folder without a list are judged before the first is fetched."""
    import boto3

    bucket = server("run", bucket="hostile")
    endpoint = bucket.partition("endpoint_override=")[2]
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket="hostile")
    for name in ("run/good", key):
        client.put_object(Bucket="hostile", Key=name, Body=b"x")
    try:
        with pytest.raises(RemoteError, match="outside the folder"):
            fetch_all(Folder(bucket, HASTE), tmp_path / "copy")
    finally:
        for name in ("run/good", key):
            client.delete_object(Bucket="hostile", Key=name)
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


def test_a_kill_between_the_two_renames_loses_nothing(sent, tmp_path):
    copy = tmp_path / "copy"
    fetch_all(Folder(sent[1]), copy)
    copy.rename(tmp_path / ".copy.before.tmp")
    fetch_all(Folder(sent[1]), copy)
    assert contents(copy) == contents(sent[0])
    assert not list(tmp_path.glob(".copy*.tmp"))


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
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a\\b").write_text("x")
    assert main([str(tmp_path / "data"), f"file://{tmp_path}/there"]) == 1
    assert not (tmp_path / "there").exists()


def test_pull_leaves_files_written_meanwhile(sent, tmp_path):
    """The store does not answer, a link to a folder being in place of a file, until the copy was written to."""
    folder, place = sent
    copy, remote = tmp_path / "copy", tmp_path / "remote/data/a.bin"
    fetch_all(Folder(place), copy)
    (folder / "a.bin").write_bytes(b"changed")
    Folder(place).send(folder)
    remote.unlink()
    remote.symlink_to(tmp_path)
    (tmp_path / "new").write_bytes(b"changed")

    def write():
        until(lambda: list(tmp_path.glob(".copy.*.tmp")))
        (copy / "thesis.txt").write_text("mine")
        (tmp_path / "new").rename(remote)  # at no moment is nothing there

    writer = threading.Thread(target=write)
    writer.start()
    with pytest.raises(RemoteError, match=all_of("changed", "fetch")):
        fetch_all(Folder(place, RetryPolicy(20, first_seconds=0.02)), copy)
    writer.join()
    assert (copy / "thesis.txt").read_text() == "mine"
    assert (copy / "a.bin").read_bytes() == b"a" * 100


def test_an_unfinished_preparation_is_not_fetched(tmp_path, capsys):
    """Its first file is plan.json; the list of a finished output, which names all files, is the last."""
    folder = tmp_path / "remote/out"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / "train-0.arrow").write_bytes(b"x")
    assert main([f"file://{folder}", str(tmp_path / "copy")]) == 1
    says(capsys.readouterr().err, "unfinished preparation", "nothing")
    assert not (tmp_path / "copy").exists()
    Folder(f"file://{tmp_path}/remote/whole").send(folder)
    assert main([f"file://{tmp_path}/remote/whole", str(tmp_path / "copy")]) == 0
    assert (tmp_path / "copy/plan.json").is_file()


def test_copy_counts_files_and_bytes(sent, tmp_path, capsys):
    folder = sent[0]
    url = f"file://{tmp_path}/there"
    assert main([str(folder), url]) == 0
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    whole = f"{sum(sizes) / 2**20:.1f} MiB in {len(sizes)} files"
    shown = capsys.readouterr()
    says(shown.out, url, whole, f"{len(sizes)} of them")
    says(shown.err, whole, url)
    assert main([str(folder), url]) == 0
    assert capsys.readouterr().out.count(", 0 of them") == 1
    assert main([url, str(tmp_path / "back")]) == 0
    assert contents(tmp_path / "back") == contents(folder)
    shown = capsys.readouterr()
    says(shown.out, f"{tmp_path}/back", whole, f"{len(sizes)} of them")
    says(shown.err, f"{len(sizes)} of {len(sizes)} files", url)
    assert main([url, str(tmp_path / "back")]) == 0
    assert capsys.readouterr().out.count(", 0 of them") == 1
    assert main([f"{url}/nothing", str(tmp_path / "none")]) == 1
    assert main([str(tmp_path / "none"), url]) == 1
    says(capsys.readouterr().err, "not a folder")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["copy", "here", "there"], ("neither is an address", "cp -r")),
        (["copy", "s3://bucket/a", "gs://bucket/b"], ("both are addresses", "copy to a folder")),
        (["push", "here", "s3://bucket/a"], "declutr copy FOLDER ADDRESS"),
        (["pull", "s3://bucket/a", "here"], "declutr copy ADDRESS FOLDER"),
    ],
)
def test_a_direction_that_is_none_is_refused(capsys, arguments, problem):
    assert declutr(arguments) == 1
    says(capsys.readouterr().err, problem)
