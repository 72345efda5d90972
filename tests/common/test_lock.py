"""One command a run folder, also after a kill -9 and over hosts."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from subprocess import PIPE

import msgspec
import pytest
from damagedjson import DAMAGED
from diskcalls import disk_calls
from messages import all_of
from waiting import until

from declutr.common.lock import LOCK, RunLock, RunLockedError, this_process

HOLD = "import sys; from pathlib import Path; from declutr.common.lock import RunLock\n"
HOLD += "with RunLock(Path(sys.argv[1]), print): print('held', flush=True); sys.stdin.read()"


def start(folder):
    """A command that holds the folder until its input ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], **pipes)


@pytest.fixture
def holder(tmp_path):
    process = start(tmp_path)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def take(folder, lost=lambda: None):
    with RunLock(folder, lost):
        assert (folder / LOCK).exists()


def test_a_second_command_is_refused_and_told_whose_the_run_is(tmp_path, holder):
    with pytest.raises(RunLockedError, match=all_of("another command", f"pid {holder.pid}")):
        take(tmp_path)
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == holder.pid


def test_the_lock_of_a_killed_command_is_taken_over_at_once(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / LOCK).exists()
    take(tmp_path)
    assert not (tmp_path / LOCK).exists()


def test_the_lock_of_a_killed_command_whose_parent_has_not_noticed_is_taken_over(tmp_path, holder):
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # the process is a zombie
    take(tmp_path)


def test_a_stopped_command_still_holds_its_lock(tmp_path, holder):
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(RunLockedError):
        take(tmp_path)


@pytest.mark.usefixtures("holder")
def test_a_pid_that_is_used_again_is_not_the_holder(tmp_path):
    record = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps(record | {"pid": os.getpid()}))
    take(tmp_path)


@pytest.mark.usefixtures("holder")
def test_heartbeat_decides_where_processes_of_the_same_host_name_are_not_seen(tmp_path):
    """Two containers may have one host name; the number of the other's process says nothing here."""
    record = json.loads((tmp_path / LOCK).read_text()) | {"processes": "another", "pid": os.getpid()}
    (tmp_path / LOCK).write_text(json.dumps(record))
    with pytest.raises(RunLockedError, match="another command works here"):
        take(tmp_path)
    old = time.time() - 61
    os.utime(tmp_path / LOCK, (old, old))
    take(tmp_path)


def test_heartbeat_on_other_host_decides_liveness(tmp_path, holder):
    record = json.loads((tmp_path / LOCK).read_text()) | {"host": "elsewhere"}
    (tmp_path / LOCK).write_text(json.dumps(record))
    with pytest.raises(RunLockedError, match="host elsewhere"):
        take(tmp_path)
    holder.kill()
    holder.wait()
    old = time.time() - 61
    os.utime(tmp_path / LOCK, (old, old))
    take(tmp_path)


def test_lock_with_a_date_in_the_future_is_stale(tmp_path, holder):
    record = json.loads((tmp_path / LOCK).read_text()) | {"host": "elsewhere"}
    holder.kill()
    holder.wait()
    (tmp_path / LOCK).write_text(json.dumps(record))
    ahead = time.time() + 86400
    os.utime(tmp_path / LOCK, (ahead, ahead))
    take(tmp_path)


INSIDE = {"nested deeply inside": b'{"x": ' + b"[" * 100_000}


@pytest.mark.parametrize("content", [b"", *DAMAGED.values(), *INSIDE.values()], ids=["empty", *DAMAGED, *INSIDE])
def test_a_damaged_lock_is_nobodys(tmp_path, log, content):
    (tmp_path / LOCK).write_bytes(content)
    take(tmp_path)
    assert len(log) == bool(content)
    assert all("lock.json is damaged" in line for line in log)
    assert not (tmp_path / LOCK).exists()


def test_lock_that_was_lost_is_reported_and_the_new_one_left_alone(tmp_path):
    told = []
    with RunLock(tmp_path, lambda: told.append("lost"), beat_seconds=0.02):
        other = json.loads((tmp_path / LOCK).read_text()) | {"token": "another"}
        (tmp_path / LOCK).write_text(json.dumps(other))
        until(lambda: told)
    assert told == ["lost"]
    assert json.loads((tmp_path / LOCK).read_text())["token"] == "another"


def point(link, target):
    """Makes the link lead there, in one moment."""
    new = link.with_name("new")
    new.symlink_to(target)
    new.rename(link)


def test_a_storage_that_is_away_for_a_while_takes_no_lock(tmp_path, log):
    disk, away, run, told = tmp_path / "disk", tmp_path / "away", tmp_path / "run", []
    disk.mkdir()
    away.write_text("")
    point(run, disk)
    with RunLock(run, lambda: told.append("lost"), beat_seconds=0.02):
        point(run, away)
        until(lambda: any("Not a directory" in line for line in log))
        os.utime(disk / LOCK, (0, 0))
        point(run, disk)
        until(lambda: (disk / LOCK).stat().st_mtime > 0)
    assert told == []
    assert not (disk / LOCK).exists()


def test_why_a_run_ended_is_not_hidden_by_a_storage_that_is_gone(tmp_path):
    disk, run = tmp_path / "disk", tmp_path / "run"
    disk.mkdir()
    point(run, disk)

    def end():
        point(run, tmp_path / "nowhere")
        raise ValueError("the reason")

    with pytest.raises(ValueError, match="the reason"), RunLock(run, print):
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


MEET = "import sys; from pathlib import Path; from declutr.common.lock import RunLock\n"
MEET += "print('ready', flush=True)\nwith RunLock(Path(sys.argv[1]), print): print('held', flush=True)"


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
