"""Every piece once, in order, through full disks and threads."""

import threading
import time

import pytest
from diskcalls import disk_calls
from volumes import small_volume

from declutr.trainer.metrics.metrics import AppendLog


def test_pieces_follow_what_is_there(tmp_path):
    path = tmp_path / "it"
    path.write_bytes(b"before\n")
    log = AppendLog(path)
    log.add(b"one\n")
    assert path.read_bytes() == b"before\n"
    log.flush()
    log.add(b"and\n")
    log.flush()
    log.flush(to_disk=True)
    log.add(b"two\n")
    log.flush(to_disk=True)
    log.flush(to_disk=True)
    assert path.read_bytes() == b"before\none\nand\ntwo\n"


def test_a_file_that_is_gone_is_not_made_anew(tmp_path):
    path = tmp_path / "it"
    path.touch()
    log = AppendLog(path)
    log.add(b"one\n")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        log.flush()
    path.touch()
    log.flush()
    assert path.read_bytes() == b"one\n"


def test_a_full_disk_and_a_read_only_one(tmp_path):
    with small_volume(tmp_path / "small", 1) as volume:
        path = volume.path / "it"
        path.touch()
        log = AppendLog(path)
        expected = bytearray()

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

    threads = [threading.Thread(target=flush, args=(to_disk,)) for to_disk in (False, True)]
    for thread in threads:
        thread.start()
    expected = [f"{number}\n".encode() for number in range(2000)]
    for number, piece in enumerate(expected):
        log.add(piece)
        if number % 10 == 0:
            time.sleep(1e-4)  # while the others write
    done.set()
    for thread in threads:
        thread.join()
    log.flush()
    assert path.read_bytes() == b"".join(expected)


SYNCED = """
from declutr.trainer.metrics.metrics import AppendLog
def prepare(here): (here / "it").touch()
def act(here):
    log = AppendLog(here / "it")
    log.add(b"one")
    log.flush(to_disk=True)
"""


def test_a_flush_to_disk_survives_a_power_failure(tmp_path):
    assert disk_calls(SYNCED, tmp_path) == [["fsync", "it"]]


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
