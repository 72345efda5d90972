"""Files and folders whole or absent; logs with every piece once, in order."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from diskcalls import disk_calls, killed_before_each
from volumes import small_volume

from declutr.common import storage
from declutr.trainer.metrics.metrics import AppendLog


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fail(context, name):
    """Writes a file of that name in the folder or file that a context yields, and fails."""
    with context as aside:
        (aside / name if aside.is_dir() else aside).write_text("half")
        raise KeyboardInterrupt


def test_a_file_appears_whole_and_an_error_leaves_the_old_one_and_nothing_else(tmp_path):
    target = tmp_path / "new" / "a.txt"
    with storage.atomic_file(target) as aside:
        aside.write_text("half")
        assert not target.exists()
        aside.write_text("whole")
    with pytest.raises(KeyboardInterrupt):
        fail(storage.atomic_file(target), "")
    assert target.read_text() == "whole"
    assert names(tmp_path / "new") == ["a.txt"]


def test_a_folder_appears_whole_or_not_at_all_and_gives_way_to_a_whole_one_on_request_alone(tmp_path):
    target = tmp_path / "run"
    with storage.atomic_folder(target) as aside:
        (aside / "sub").mkdir()
        (aside / "sub" / "a.txt").write_text("a")
        assert not target.exists()
    with pytest.raises(KeyboardInterrupt):
        fail(storage.atomic_folder(tmp_path / "other"), "a.txt")
    with pytest.raises(KeyboardInterrupt):
        fail(storage.atomic_folder(target, replace=True), "b.txt")
    with pytest.raises(FileExistsError, match="run exists already"), storage.atomic_folder(target):
        pass
    assert (target / "sub" / "a.txt").read_text() == "a"
    assert names(tmp_path) == ["run"]
    with storage.atomic_folder(target, replace=True) as aside:
        (aside / "b.txt").write_text("new")
    assert names(target) == ["b.txt"]
    assert names(tmp_path) == ["run"]
    with pytest.raises(FileNotFoundError), storage.atomic_folder(target, replace=True) as aside:
        aside.rename(tmp_path / "stolen")
    assert names(tmp_path) == ["run", "stolen"], "the new one cannot take the name"
    assert (target / "b.txt").read_text() == "new"


def test_json_is_read_back_and_hashed(tmp_path):
    value = {"b": [1, 2.5, None], "a": "é"}
    storage.write_json(tmp_path / "x.json", value)
    assert storage.read_json(tmp_path / "x.json") == value
    assert storage.hash_json(value) == storage.hash_json(dict(reversed(value.items())))
    assert storage.hash_json(value) != storage.hash_json(value | {"a": "e"})
    (tmp_path / "abc").write_bytes(b"abc")
    assert storage.hash_file(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    for number in (1, 2):
        (tmp_path / "run").mkdir()
        assert storage.set_aside(tmp_path / "run").name == f"run.kept-{number}"
    assert names(tmp_path) == ["abc", "run.kept-1", "run.kept-2", "x.json"]


FOLDER = """
from declutr.common import storage
def prepare(here):
    (here / "run").mkdir()
    (here / "run" / "a").write_text("old")
def act(here):
    with storage.atomic_folder(here / "run", replace=True) as aside:
        (aside / "sub").mkdir()
        (aside / "sub" / "b").write_text("new")
"""
FILE = """
from declutr.common import storage
def prepare(here): storage.write_text(here / "a", "old")
def act(here): storage.write_text(here / "a", "new")
"""
SYNCED = """
from declutr.trainer.metrics.metrics import AppendLog
def prepare(here): (here / "it").touch()
def act(here):
    log = AppendLog(here / "it")
    log.add(b"one")
    log.flush(to_disk=True)
"""


def test_a_power_failure_after_a_rename_or_a_flush_finds_the_file_or_folder_on_disk(tmp_path):
    """The file is on disk before it has its name, and its name before the call returns."""
    sync, rename, last = disk_calls(FILE, tmp_path / "file")
    assert rename[1:] == [sync[1], "a"]
    assert [sync[0], last] == ["fsync", ["fsync", "."]]
    assert disk_calls(SYNCED, tmp_path / "log") == [["fsync", "it"]]
    calls = disk_calls(FOLDER, tmp_path / "folder")
    rename = next(call for call in calls if call[0] == "rename" and call[2] == "run")
    place, aside = calls.index(rename), rename[1]
    assert {aside, f"{aside}/sub", f"{aside}/sub/b"} <= {call[1] for call in calls[:place] if call[0] == "fsync"}
    assert calls[place + 1] == ["fsync", "."], "the old folder is deleted once the new one's name is on disk"


def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path):
    trees = []
    for here in killed_before_each(FOLDER, tmp_path):
        storage.put_back(here / "run")
        trees.append(sorted(str(path.relative_to(here / "run")) for path in (here / "run").rglob("*")))
    assert len(trees) > 5
    assert all(tree in (["a"], ["sub", "sub/b"]) for tree in trees), trees
    assert trees == sorted(trees), "once the new one is there, it stays"
    assert [(here / "a").read_text() for here in killed_before_each(FILE, tmp_path / "killed")] == ["old", "old", "new"]


def test_pieces_follow_what_is_there_and_a_file_that_is_gone_is_not_made_anew(tmp_path):
    path = tmp_path / "it"
    path.write_bytes(b"before\n")
    log = AppendLog(path)
    log.add(b"one\n")
    assert path.read_bytes() == b"before\n"
    log.flush()
    for piece, first in ((b"and\n", False), (b"two\n", True)):
        log.add(piece)
        log.flush(first)
        log.flush(to_disk=True)
    assert path.read_bytes() == b"before\none\nand\ntwo\n"
    path.write_bytes(b"")
    log = AppendLog(path)
    log.add(b"one\n")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        log.flush()
    path.touch()
    log.flush()
    assert path.read_bytes() == b"one\n"


def test_appendlog_keeps_its_lines_over_a_full_disk_and_a_read_only_one(tmp_path):
    with small_volume(tmp_path / "small", 1) as volume:
        path = volume.path / "it"
        path.touch()
        log, expected = AppendLog(path), bytearray()

        def add(count):
            for _ in range(count):
                piece = f"{len(expected)} ".encode() * 20 + b"\n"
                expected.extend(piece)
                log.add(piece)

        add(10)
        log.flush(to_disk=True)
        volume.fill()
        add(200)
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                log.flush()
            add(5)
        assert path.read_bytes() != expected
        volume.drain()
        log.flush(to_disk=True)
        assert path.read_bytes() == expected
        volume.read_only(True)
        add(3)
        with pytest.raises(OSError, match="Read-only"):
            log.flush()
        volume.read_only(False)
        log.flush()
        assert path.read_bytes() == expected


def test_appendlog_of_several_threads_keeps_every_line(tmp_path):
    path = tmp_path / "it"
    path.touch()
    log = AppendLog(path)
    done = threading.Event()

    def flush(to_disk):
        while not done.is_set():
            log.flush(to_disk)
            time.sleep(0)

    expected = [f"{number}\n".encode() for number in range(2000)]
    with ThreadPoolExecutor(2) as pool:
        flushes = [pool.submit(flush, to_disk) for to_disk in (False, True)]
        for number, piece in enumerate(expected):
            log.add(piece)
            if number % 10 == 0:
                time.sleep(1e-4)  # while the others write
        done.set()
    assert [flush.result() for flush in flushes] == [None, None]
    log.flush()
    assert path.read_bytes() == b"".join(expected)


def test_appendlog_writes_again_after_a_failed_fsync(tmp_path):
    """/dev/null takes every byte and refuses to sync: a disk that lost its cache."""
    disk, path = tmp_path / "disk", tmp_path / "it"
    disk.touch()
    path.symlink_to("/dev/null")
    log = AppendLog(path)
    log.add(b"one\n")
    log.flush()
    with pytest.raises(OSError, match="Invalid argument"):
        log.flush(to_disk=True)
    path.unlink()
    path.symlink_to(disk)
    log.add(b"two\n")
    log.flush(to_disk=True)
    assert disk.read_bytes() == b"one\ntwo\n"
