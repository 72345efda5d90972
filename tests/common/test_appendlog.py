"""Every piece once, in order, through full disks and threads."""

import threading
import time

import pytest
from volumes import small_volume

from common.appendlog import AppendLog


def test_pieces_follow_what_is_there(tmp_path):
    path = tmp_path / "it"
    path.write_bytes(b"before\n")
    journal = AppendLog(path)
    journal.add(b"one\n")
    assert path.read_bytes() == b"before\n"
    journal.flush()
    journal.flush(to_disk=True)
    journal.add(b"two\n")
    journal.flush(to_disk=True)
    journal.flush(to_disk=True)
    assert path.read_bytes() == b"before\none\ntwo\n"


def test_a_file_that_is_gone_is_not_made_anew(tmp_path):
    path = tmp_path / "it"
    path.touch()
    journal = AppendLog(path)
    journal.add(b"one\n")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        journal.flush()
    path.touch()
    journal.flush()
    assert path.read_bytes() == b"one\n"


def test_a_full_disk_and_a_read_only_one(tmp_path):
    with small_volume(tmp_path / "small", 1) as volume:
        path = volume.path / "it"
        path.touch()
        journal = AppendLog(path)
        expected = bytearray()

        def add(count):
            for _ in range(count):
                piece = f"{len(expected)} ".encode() * 20 + b"\n"
                expected.extend(piece)
                journal.add(piece)

        add(10)
        journal.flush(to_disk=True)
        volume.fill()
        add(200)
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                journal.flush()
            add(5)
        assert path.read_bytes() != expected
        volume.drain()
        journal.flush(to_disk=True)
        assert path.read_bytes() == expected
        volume.read_only(True)
        add(3)
        with pytest.raises(OSError, match="Read-only"):
            journal.flush()
        volume.read_only(False)
        journal.flush()
        assert path.read_bytes() == expected


def test_threads(tmp_path):
    path = tmp_path / "it"
    path.touch()
    journal = AppendLog(path)
    done = threading.Event()

    def flush(to_disk):
        while not done.is_set():
            journal.flush(to_disk)
            time.sleep(0)

    threads = [threading.Thread(target=flush, args=(to_disk,)) for to_disk in (False, True)]
    for thread in threads:
        thread.start()
    expected = [f"{number}\n".encode() for number in range(2000)]
    for piece in expected:
        journal.add(piece)
    done.set()
    for thread in threads:
        thread.join()
    journal.flush()
    assert path.read_bytes() == b"".join(expected)
