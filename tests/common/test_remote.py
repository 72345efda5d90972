"""Folders in object stores, on an S3 server of this machine and on a plain folder: whole or not there, and patient."""

import json
import os
import threading
import time

import pyarrow.fs
import pytest

from common.remote import (
    LISTING,
    Patience,
    RemoteError,
    child,
    filesystem,
    is_whole,
    main,
    names,
    pull_folder,
    push_file,
    push_folder,
    remove_folder,
)

HASTE = Patience(total_seconds=0.3, first_seconds=0.05)
SMALL = bytes(range(256))
LARGE = SMALL * (11 * 4096)  # 11 MiB: more than one part of an upload, more than one chunk of a download


@pytest.fixture(scope="module")
def server():
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    running = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    changed = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    before = {key: os.environ.get(key) for key in changed}
    os.environ.update(changed)
    yield running.get_host_and_port()
    running.stop()
    for key, value in before.items():
        os.environ.pop(key) if value is None else os.environ.update({key: value})


@pytest.fixture(params=["s3", "file"])
def place(request, tmp_path):
    """Address of a folder that does not exist yet."""
    if request.param == "file":
        return f"file://{tmp_path}/remote/run"
    host, port = request.getfixturevalue("server")
    store, _ = pyarrow.fs.FileSystem.from_uri(
        f"s3://bucket?endpoint_override=http://{host}:{port}&allow_bucket_creation=true"
    )
    store.create_dir("bucket")
    return f"s3://bucket/{request.node.name}/run?endpoint_override=http://{host}:{port}"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "local"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.bin").write_bytes(SMALL)
    (folder / "deep" / "b c.txt").write_text("b")
    (folder / "empty").write_bytes(b"")
    return folder


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


def test_what_is_there_already_is_not_sent_again(place, folder):
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
        ("a.bin", SMALL[:-1], "a.bin is truncated or altered"),
        ("a.bin", SMALL[:-1] + b"x", "a.bin is truncated or altered"),
        (LISTING, b"{", "no list of files"),
        (LISTING, json.dumps({"files": {"../x": {"sha256": "0", "num_bytes": 1}}}).encode(), "outside"),
        (LISTING, json.dumps({"files": {"/etc/x": {"sha256": "0", "num_bytes": 1}}}).encode(), "outside"),
        (
            LISTING,
            json.dumps({"files": {"gone": {"sha256": "0", "num_bytes": 1}}}).encode(),
            "gone|does not exist|No such",
        ),
    ],
)
def test_what_is_not_whole_is_never_taken_for_whole(place, folder, tmp_path, name, data, wrong):
    push_folder(folder, place)
    overwrite(place, name, data)
    with pytest.raises(RemoteError, match=wrong):
        pull_folder(place, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert [path.name for path in tmp_path.glob(".back*")] == [".back.lock"]


def test_a_half_sent_folder_is_not_there(place, folder, tmp_path):
    push_file(folder / "a.bin", child(place, "a.bin"))
    assert not is_whole(place)
    with pytest.raises(FileNotFoundError, match="no whole folder"):
        pull_folder(place, tmp_path / "back")


def test_many_that_ask_at_once_fetch_once(place, folder, tmp_path):
    push_folder(folder, place)
    threads = [threading.Thread(target=pull_folder, args=(place, tmp_path / "back")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(tmp_path / "back") == contents(folder)


def test_a_bucket_that_is_not_there_is_told_at_once(server, folder):
    host, port = server
    began = time.monotonic()
    with pytest.raises(RemoteError, match="bucket"):
        push_folder(folder, f"s3://no-such-bucket/run?endpoint_override=http://{host}:{port}")
    assert time.monotonic() - began < 30
    with pytest.raises(RemoteError, match="nosuch"):
        push_folder(folder, "nosuch://x/y", HASTE)


def test_an_outage_is_waited_for_and_told_once(folder, tmp_path, caplog):
    """A place whose folder is a file at first, so that everything in it fails."""
    gate = tmp_path / "gate"
    gate.write_text("in the way")
    caplog.set_level("INFO", logger="declutr")
    with pytest.raises(RemoteError, match="has not answered for 0 s"):
        push_folder(folder, f"file://{gate}/run", HASTE)

    caplog.clear()
    opening = threading.Timer(0.5, gate.unlink)
    opening.start()
    push_folder(folder, f"file://{gate}/run", Patience(60, first_seconds=0.05))
    opening.join()
    told = [record.getMessage() for record in caplog.records]
    assert ["does not answer" in line for line in told] == [True, False]
    assert "answers again" in told[1]
    pull_folder(f"file://{gate}/run", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)


def test_commands(folder, tmp_path, capsys):
    url = f"file://{tmp_path}/there"
    assert main(["push", str(folder), url]) == 0
    assert main(["pull", url, str(tmp_path / "back")]) == 0
    assert contents(tmp_path / "back") == contents(folder)
    assert main(["pull", f"{url}/nothing", str(tmp_path / "none")]) == 1
    assert main(["push", str(tmp_path / "none"), url]) == 1
    assert "is no folder" in capsys.readouterr().err
