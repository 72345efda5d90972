"""One command a run, also after a kill -9 and over hosts; the thread that renews its lock."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from subprocess import PIPE

import msgspec
import pytest
from broken import DAMAGED
from diskcalls import disk_calls
from messages import all_of
from processes import until
from s3server import s3_server

from declutr.common.errors import RunLockedError
from declutr.common.lock import LOCK, RunLock, StoreLock, this_process
from declutr.common.stores.folder import Folder
from declutr.common.watcher import Watcher

LOCKS = {"folder": "RunLock(Path(place), {lost})", "store": "StoreLock(Folder(f'file://{{place}}'), {lost})"}
NAMES = "from pathlib import Path; from declutr.common.lock import RunLock, StoreLock; "
NAMES += "from declutr.common.stores.folder import Folder; import sys; place = sys.argv[1]\n"


def start(folder, kind="folder"):
    """A command that holds the folder until its input ends."""
    script = f"{NAMES}with {LOCKS[kind].format(lost='print')}: print('held', flush=True); sys.stdin.read()"
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True
    )


@pytest.fixture(params=LOCKS)
def kind(request):
    """The lock of a folder, and the one of a store, here of the same folder."""
    return request.param


@pytest.fixture
def holder(tmp_path, kind):
    process = start(tmp_path, kind)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def lock_of(folder, kind, lost=lambda: None, **options):
    return (
        RunLock(folder, lost, **options) if kind == "folder" else StoreLock(Folder(f"file://{folder}"), lost, **options)
    )


def take(folder, kind="folder"):
    with lock_of(folder, kind):
        assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
    assert list(folder.iterdir()) == []


def test_a_second_command_is_refused_and_told_whose_the_run_is_also_of_a_stopped_one(tmp_path, holder, kind):
    with pytest.raises(RunLockedError, match=all_of("another command", f"pid {holder.pid}")):
        take(tmp_path, kind)
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == holder.pid
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(RunLockedError):
        take(tmp_path, kind)


@pytest.mark.parametrize("noticed", [True, False])
def test_the_lock_of_a_killed_command_is_taken_over_at_once(tmp_path, holder, kind, noticed):
    """Also while the process is a zombie, because its parent has not noticed."""
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | (0 if noticed else os.WNOWAIT))
    assert (tmp_path / LOCK).exists()
    take(tmp_path, kind)


@pytest.mark.usefixtures("holder")
def test_a_pid_that_is_used_again_is_not_the_holder(tmp_path, kind):
    record = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps(record | {"pid": os.getpid()}))
    take(tmp_path, kind)


@pytest.mark.parametrize("other", [{"host": "elsewhere"}, {"processes": "another", "pid": os.getpid()}])
@pytest.mark.parametrize("behind_seconds", [-3600, 0, 61])  # the holder's clock
@pytest.mark.parametrize(("age_seconds", "refused"), [(5, True), (70, False), (-86400, False)])
def test_heartbeat_decides_for_other_hosts_by_the_clock_of_the_storage(
    tmp_path, kind, other, age_seconds, refused, behind_seconds
):
    """Two containers may have one host name; the number of the other's process says nothing here."""
    with lock_of(tmp_path, kind):
        record = json.loads((tmp_path / LOCK).read_text()) | other
    renewed = time.time() - age_seconds
    (tmp_path / LOCK).write_text(json.dumps(record | {"beat": renewed - behind_seconds}))
    os.utime(tmp_path / LOCK, (renewed, renewed))
    if refused:
        with pytest.raises(RunLockedError, match=f"host {record['host']}"):
            take(tmp_path, kind)
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    else:
        take(tmp_path, kind)


INSIDE = {"nested deeply inside": b'{"x": ' + b"[" * 100_000}


@pytest.mark.parametrize("content", [b"", *DAMAGED.values(), *INSIDE.values()], ids=["empty", *DAMAGED, *INSIDE])
def test_a_damaged_lock_is_nobodys(tmp_path, log, content, kind):
    (tmp_path / LOCK).write_bytes(content)
    take(tmp_path, kind)
    assert len(log) == bool(content)
    assert all("lock.json is damaged" in line for line in log)


def test_lock_is_renewed_and_its_loss_reported(tmp_path, kind):
    lost = threading.Event()
    with lock_of(tmp_path, kind, lost.set, beat_seconds=0.02):
        os.utime(tmp_path / LOCK, (0, 0))
        until(lambda: (tmp_path / LOCK).stat().st_mtime > 0)
        record = msgspec.json.encode(this_process("another's")).decode()
        while not lost.is_set():  # a renewal on its way may take its place once
            (tmp_path / "new").write_text(record)
            (tmp_path / "new").rename(tmp_path / LOCK)
            lost.wait(0.2)
    assert json.loads((tmp_path / LOCK).read_text())["token"] == "another's"


def test_of_commands_that_enter_a_store_at_the_same_moment_one_stays():
    """Each reads the lock only while it meets no entry of another command."""
    with s3_server() as address:
        remote, barrier, winners, refused = Folder(address("run")), threading.Barrier(4), [], []
        done = threading.Event()

        def enter():
            barrier.wait()
            try:
                with StoreLock(remote, lambda: None) as lock:
                    winners.append(lock)
                    done.wait()
            except RunLockedError as error:
                refused.append(error)

        threads = [threading.Thread(target=enter) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: len(winners) + len(refused) == 4)
        assert len(winners) == 1
        assert remote.names() == [LOCK]
        done.set()
        for thread in threads:
            thread.join()
        assert remote.names() == []


def test_ctrl_c_while_a_lock_is_written_leaves_none(tmp_path, kind):
    lock = lock_of(tmp_path, kind)
    write = lock._write

    def interrupted():
        write()
        raise KeyboardInterrupt

    lock._write = interrupted
    with pytest.raises(KeyboardInterrupt), lock:
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("age_seconds", [5, 70])
def test_an_entry_of_a_command_that_was_killed_is_waited_for_a_minute(tmp_path, monkeypatch, age_seconds):
    monkeypatch.setattr("declutr.common.lock._ATTEMPTS", 3)
    entry = tmp_path / f".{LOCK}.killed"
    entry.write_bytes(b"{}")
    written = time.time() - age_seconds
    os.utime(entry, (written, written))
    if age_seconds < 60:
        with pytest.raises(RunLockedError, match="same time"):
            take(tmp_path, "store")
        assert list(tmp_path.iterdir()) == [entry]
    else:
        take(tmp_path, "store")


def point(link, target):
    """Makes the link lead there, in one moment."""
    new = link.with_name("new")
    new.symlink_to(target)
    new.rename(link)


def test_a_storage_that_is_away_for_a_while_takes_no_lock(tmp_path, log):
    disk, away, run, losses = tmp_path / "disk", tmp_path / "away", tmp_path / "run", []
    disk.mkdir()
    away.write_text("")
    point(run, disk)
    with RunLock(run, lambda: losses.append("lost"), beat_seconds=0.02):
        point(run, away)
        until(lambda: any("Not a directory" in line for line in log))
        os.utime(disk / LOCK, (0, 0))
        point(run, disk)
        until(lambda: (disk / LOCK).stat().st_mtime > 0)
    assert losses == []
    assert not (disk / LOCK).exists()


def test_why_a_run_ended_is_not_hidden_by_a_storage_that_is_gone(tmp_path):
    (tmp_path / "run").mkdir()

    def end():
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), RunLock(tmp_path / "run", print):
        end()


def test_stale_lock_is_taken_by_one_of_many_commands(tmp_path):
    (tmp_path / LOCK).write_text("{")
    commands = [start(tmp_path) for _ in range(3)]
    until(lambda: sum(command.poll() is not None for command in commands) >= 2)
    (holder,) = [command for command in commands if command.poll() is None]
    assert holder.communicate(timeout=60)[0] == "held\n"
    for command in commands:
        if command is not holder:
            assert "RunLockedError" in command.communicate()[1]
    assert not (tmp_path / LOCK).exists()


MEET = f"{NAMES}print('ready', flush=True)\nwith {LOCKS['folder'].format(lost='print')}: print('held', flush=True)"


@pytest.mark.parametrize("unlinked", [False, True])
def test_a_command_that_looks_while_another_takes_the_lock_waits_and_is_refused(tmp_path, unlinked):
    """This process holds the flock as a command does that enters, or as one that leaves and is followed by another."""
    path = tmp_path / LOCK
    with path.open("a+") as entering:
        fcntl.flock(entering, fcntl.LOCK_EX)
        other = subprocess.Popen([sys.executable, "-c", MEET, tmp_path], stdout=PIPE, stderr=PIPE, text=True)
        assert other.stdout.readline() == "ready\n"
        time.sleep(0.3)  # the time in which it would take a lock that it does not wait for
        if unlinked:
            path.unlink()
        path.write_bytes(msgspec.json.encode(this_process("mine")))
    out, error = other.communicate(timeout=60)
    assert out == ""
    assert f"pid {os.getpid()}" in error
    assert json.loads(path.read_text())["token"] == "mine"


HOLDS = """
from declutr.common.lock import RunLock
def prepare(here): pass
def act(here):
    with RunLock(here, print):
        pass
"""


def test_the_holder_is_on_disk_before_its_block_runs(tmp_path):
    assert disk_calls(HOLDS, tmp_path) == [["fsync", LOCK], ["unlink", LOCK]]


class Counter(Watcher):
    """Counts its calls; the third one ends the thread."""

    calls = 0

    def look(self):
        self.calls += 1
        return self.calls < 3


def test_calls_repeat_until_false_or_the_end_of_the_block():
    with Counter(0.01, "test") as counter:
        counter._thread.join(60)
        assert not counter._thread.is_alive()
    assert counter.calls == 3
    with Counter(3600, "test") as counter:
        pass
    assert counter.calls == 0, "the pause comes first, and the end of the block cuts it short"
    with Counter(3600, "test", at_once=True) as counter:
        until(lambda: counter.calls == 1)


def test_a_call_that_has_begun_is_over_when_the_block_ends():
    begun, ended = threading.Event(), []

    class Slow(Watcher):
        def look(self):
            begun.set()
            time.sleep(0.2)
            ended.append(1)

    with Slow(3600, "test", at_once=True):
        assert begun.wait(60)
    assert ended == [1]
