"""Commands in a session of their own: real processes, groups, terminals and deaths, without Ray."""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import environment, until

from declutr.common.relay import end_at_signals

# Prints "ready", process ids, and a line for every signal; meanwhile a process of its group waits, as Ray's do.
COMMAND = """
import os, select, signal, subprocess, sys, time
from declutr.common import relay
{before}
relay.relay()
helper = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # ends with this process
for number in map(int, sys.argv[1:]):
    signal.signal(number, lambda number, _: os.write(1, signal.Signals(number).name.encode() + b"\\n"))
print("ready", os.getpid(), helper.pid, os.getsid(0), relay.command_pid(), flush=True)
try:
    {work}
finally:
    helper.kill()
"""
# A signal that arrives just before `readline` waits would be handled only after a line, so the wait is in pieces.
WAIT = "any(iter(lambda: bool(select.select([0], [], [], 0.1)[0]), True)); line = sys.stdin.readline(); "
WAIT += "print('read', line, end='', flush=True)"
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def command(work=WAIT, handled=HANDLED, before="", prefix=(), **options):
    """The running command, with the ids of the child and of its helper."""
    code = COMMAND.format(work=work, before=before)
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", code, *map(str, map(int, handled))],
        env=environment(),
        **({"process_group": 0, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True} | options),
    )
    try:
        words = process.stdout.readline().split()
        assert words[:1] == ["ready"], words
        child, helper, session, known_as = map(int, words[1:])
        assert session == child
        yield process, child, helper, known_as
    finally:
        process.kill()  # the child is killed along with it
        process.wait(20)
        process.stdin.close()
        process.stdout.close()


def state(pid):
    """Letter of the state of a process in /proc; None after its end."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if found in "ZX" else found


def answer(process, line="go\n"):
    process.stdin.write(line)
    process.stdin.flush()
    return process.stdout.readline()


@pytest.mark.parametrize("number", HANDLED)
def test_signal_to_the_group_reaches_the_command_once_and_its_helpers_not_at_all(number):
    with command() as (process, _, helper, known_as):
        assert known_as == process.pid
        os.killpg(process.pid, number)
        assert process.stdout.readline() == f"{signal.Signals(number).name}\n"
        assert state(helper) is not None
        assert answer(process) == "read go\n"
        assert process.wait(20) == 0


def test_timeout_reaches_the_command_alone():
    if not shutil.which("timeout"):
        pytest.skip("no timeout here")
    with command(prefix=["timeout", "60"]) as (process, _, helper, _):
        process.terminate()  # timeout signals its command and their group, as it does when the time is over
        assert process.stdout.readline() == "SIGTERM\n"
        assert state(helper) is not None


@pytest.mark.parametrize(
    ("work", "code"),
    [
        ("sys.exit(143)", 143),
        ("pass", 0),
        ("raise ValueError", 1),
        ("os.abort()", -signal.SIGABRT),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGPIPE); signal.signal(13, signal.SIG_DFL); os.kill(os.getpid(), 13)", -13),
    ],
)
def test_exit_status_is_that_of_the_child_also_of_a_death(work, code):
    with command(work, stderr=subprocess.DEVNULL) as (process, *_):
        assert process.wait(20) == code


def test_unhandled_signal_ends_both_by_it():
    with command(handled=()) as (process, child, *_):
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM
        assert state(child) is None


NO_KERNEL = "end = relay.end_with; relay.end_with = lambda parent: end(parent, kernel=False)"


@pytest.mark.parametrize(
    ("before", "halt"), [("", False), ("", True), pytest.param(NO_KERNEL, False, marks=pytest.mark.slow)]
)
def test_killed_command_takes_its_child_along_even_a_stopped_one_or_without_the_kernel(before, halt):
    with command(before=before) as (process, child, *_):
        if halt:
            os.kill(child, signal.SIGSTOP)
            until(lambda: state(child) == "T", "a stopped child", 20)
        process.kill()
        until(lambda: state(child) is None, "the end of the child", 20)


def test_ignored_hangup_stays_ignored_and_interrupt_is_taken():
    with command(before="signal.signal(1, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN)", handled=(2,)) as (
        process,
        child,
        *_,
    ):
        os.killpg(process.pid, signal.SIGHUP)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "SIGINT\n"
        assert state(child) is not None


def test_suspending_has_no_effect():
    with command() as (process, *_):
        os.killpg(process.pid, signal.SIGTSTP)
        os.kill(process.pid, signal.SIGTERM)  # still forwarded
        assert process.stdout.readline() == "SIGTERM\n"
        assert answer(process) == "read go\n"
        assert process.wait(20) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the terminal is made as Linux does")
def test_terminal_is_read_written_and_interrupts():
    """Lines typed into a terminal whose foreground group is the command's; Ctrl-C comes from the terminal itself."""
    work = "print(sys.stdin.isatty(), sys.stderr.isatty(), os.get_terminal_size(2).columns); " + WAIT
    code = COMMAND.format(work=work, before="")
    line = [sys.executable, "-c", code, str(int(signal.SIGINT))]
    spawn = f"import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn({line!r})))"
    process = subprocess.Popen(
        [sys.executable, "-c", spawn], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    shown = b""

    def read_until(text):
        nonlocal shown
        deadline = time.monotonic() + 20
        while text not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([process.stdout], [], [], 1)[0]:
                shown += os.read(process.stdout.fileno(), 1000)

    with process:
        read_until(b"True True")
        os.write(process.stdin.fileno(), b"\x03")
        read_until(b"SIGINT")
        os.write(process.stdin.fileno(), b"typed\n")
        read_until(b"read typed")
        assert process.wait(20) == 0


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="a process namespace needs root on Linux")
def test_first_process_of_a_container_forwards_and_takes_in_orphans():
    orphan = "subprocess.run(['sh', '-c', 'sleep 0.1 &']); " + WAIT
    prefix = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with command(orphan, handled=(), prefix=prefix) as (process, *_):
        first = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        children = Path(f"/proc/{first}/task/{first}/children")
        until(lambda: len(children.read_text().split()) == 1, "orphans to be taken in", 20)
        os.kill(first, signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM


def test_command_ends_at_signals_with_their_status_and_an_ignored_hangup_stays_ignored():
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        signal.signal(signal.SIGTERM, lambda *_: None)  # as Ray leaves it
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # Ray Tune leaves a handler
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        end_at_signals()
        signal.raise_signal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        end_at_signals()
        for number in numbers:
            with pytest.raises(SystemExit) as ended:
                signal.raise_signal(number)
            assert ended.value.code == 128 + number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
