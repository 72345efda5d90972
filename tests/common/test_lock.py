"""One command a run, also after a kill -9 and over hosts; the thread that renews its lock."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from subprocess import PIPE

import msgspec
import pytest
from broken import DAMAGED
from diskcalls import disk_calls
from messages import all_of
from processes import until

from declutr.common.errors import RunLockedError
from declutr.common.lock import LOCK, RunLock, StoreLock, this_process
from declutr.common.stores.folder import Folder
from declutr.common.watcher import Watcher

LOCKS = {"folder": "RunLock(Path(place), {lost})", "store": "StoreLock(Folder(f'file://{{place}}'), {lost})"}
NAMES = "from pathlib import Path; from declutr.common.lock import RunLock, StoreLock; "
NAMES += "from declutr.common.stores.folder import Folder; import sys; place = sys.argv[1]\n"


def start(folder, kind="folder", before="", after="sys.stdin.read()"):
    """A command that holds the folder until its input ends."""
    script = f"{NAMES}{before}\nwith {LOCKS[kind].format(lost='print')}: print('held', flush=True); {after}"
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)


@pytest.fixture(params=LOCKS)
def kind(request):
    """The lock of a folder, and the one of a store, here of the same folder."""
    return request.param


def lock_of(folder, kind, lost=lambda: None, **options):
    place = folder if kind == "folder" else Folder(f"file://{folder}")
    return (RunLock if kind == "folder" else StoreLock)(place, lost, **options)


def take(folder, kind="folder"):
    with lock_of(folder, kind):
        assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("noticed", [True, False])
def test_the_lock_of_a_command_is_refused_also_if_that_is_stopped_and_taken_over_when_killed(tmp_path, kind, noticed):
    """At once, also while the process is a zombie, because its parent has not noticed."""
    holder = start(tmp_path, kind)
    assert holder.stdout.readline() == "held\n"
    for number in (signal.SIGCONT, signal.SIGSTOP):
        holder.send_signal(number)
        with pytest.raises(RunLockedError, match=all_of("another command", f"pid {holder.pid}")):
            take(tmp_path, kind)
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == holder.pid
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | (0 if noticed else os.WNOWAIT))
    take(tmp_path, kind)
    holder.communicate()


def test_a_pid_that_is_used_again_is_not_the_holder(tmp_path, kind):
    with lock_of(tmp_path, kind):
        record = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps(record | {"began": "1"}))
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
    with pytest.raises(RunLockedError, match=f"host {record['host']}") if refused else nullcontext():
        take(tmp_path, kind)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK] * refused


DAMAGES = {"empty": b"", **DAMAGED, "nested deeply inside": b'{"x": ' + b"[" * 100_000}


@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES)
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


def test_of_commands_that_enter_a_store_at_the_same_moment_one_stays(server):
    """Each reads the lock only while it meets no entry of another command."""
    remote, barrier, done, winners, refused = Folder(server("run")), threading.Barrier(4), threading.Event(), [], []

    def enter():
        barrier.wait()
        try:
            with StoreLock(remote, lambda: None) as lock:
                winners.append(lock)
                done.wait()
        except RunLockedError as error:
            refused.append(error)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(enter)
        until(lambda: len(winners) + len(refused) == 4)
        names = remote.names()
        done.set()
    assert (len(winners), names, remote.names()) == (1, [LOCK], [])


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
    os.utime(entry, times=(time.time() - age_seconds,) * 2)
    with pytest.raises(RunLockedError, match="same time") if age_seconds < 60 else nullcontext():
        take(tmp_path, "store")
    assert list(tmp_path.iterdir()) == [entry] * (age_seconds < 60)


def test_a_storage_that_is_away_for_a_while_takes_no_lock(tmp_path, log):
    disk, away, run, losses = tmp_path / "disk", tmp_path / "away", tmp_path / "run", []
    disk.mkdir()
    away.write_text("")

    def point(target):  # in one moment
        (tmp_path / "new").symlink_to(target)
        (tmp_path / "new").rename(run)

    point(disk)
    with RunLock(run, lambda: losses.append("lost"), beat_seconds=0.02):
        point(away)
        until(lambda: any("Not a directory" in line for line in log))
        os.utime(disk / LOCK, (0, 0))
        point(disk)
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


@pytest.mark.parametrize("unlinked", [False, True])
def test_a_command_that_looks_while_another_takes_the_lock_waits_and_is_refused(tmp_path, unlinked):
    """This process holds the flock as a command does that enters, or as one that leaves and is followed by another."""
    path = tmp_path / LOCK
    with path.open("a+") as entering:
        fcntl.flock(entering, fcntl.LOCK_EX)
        other = start(tmp_path, before="print('ready', flush=True)", after="")
        assert other.stdout.readline() == "ready\n"
        time.sleep(0.3)  # the time in which it would take a lock that it does not wait for
        if unlinked:
            path.unlink()
        path.write_bytes(msgspec.json.encode(this_process("mine")))
    out, error = other.communicate(timeout=60)
    assert out == ""
    assert f"pid {os.getpid()}" in error
    assert json.loads(path.read_text())["token"] == "mine"


def test_the_holder_is_on_disk_before_its_block_runs(tmp_path):
    code = "def prepare(here): pass\ndef act(here):\n    with RunLock(here, print): pass\n"
    calls = disk_calls(f"from declutr.common.lock import RunLock\n{code}", tmp_path)
    assert calls == [["fsync", LOCK], ["unlink", LOCK]]


class Counter(Watcher):
    """Counts its calls; the third one ends the thread."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.begun, self.calls = threading.Event(), 0

    def look(self):
        self.begun.set()
        time.sleep(0.1)
        self.calls += 1
        return self.calls < 3


def test_calls_repeat_until_false_or_the_end_of_the_block():
    with Counter(0.01, "test") as counter:
        until(lambda: not counter._thread.is_alive())
    assert counter.calls == 3
    with Counter(3600, "test") as counter:
        pass
    assert counter.calls == 0, "the pause comes first, and the end of the block cuts it short"
    with Counter(3600, "test", at_once=True) as counter:
        assert counter.begun.wait(60)
    assert counter.calls == 1, "a call that has begun is over when the block ends"
