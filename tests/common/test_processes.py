"""The process of a command: its own session, signals, terminals and deaths; what it writes steers no terminal."""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import environment, run_python, until

from declutr.common.console import logs
from declutr.common.console.logs import get_logger, setup_logging
from declutr.common.console.terminal import shown, visible
from declutr.common.relay import end_at_signals

# Prints "ready", process ids, and a line for every signal; meanwhile a process of its group waits, as Ray's do.
COMMAND = """
import os, select, signal, subprocess, sys, time
from declutr.common import relay
for number in map(int, sys.argv[1:]):
    signal.signal(number, signal.SIG_DFL)  # one that the tests' own caller ignores, as `nohup` does, would stay ignored
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
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "process_group": 0}
    words = [*prefix, sys.executable, "-c", code, *map(str, map(int, handled))]
    process = subprocess.Popen(words, env=environment(), **pipes, **options)
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
    with suppress(FileNotFoundError, ProcessLookupError):
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return None if letter in "ZX" else letter


@pytest.mark.parametrize("number", HANDLED)
def test_signal_to_the_group_reaches_the_command_once_and_its_helpers_not_at_all(number):
    with command() as (process, _, helper, known_as):
        assert known_as == process.pid
        if number == signal.SIGTERM:
            os.killpg(process.pid, signal.SIGTSTP)  # suspending has no effect
        os.killpg(process.pid, number)
        assert process.stdout.readline() == f"{signal.Signals(number).name}\n"
        assert state(helper) is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "read go\n"
        assert process.wait(20) == 0


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
    before = "signal.signal(1, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN)"
    with command(before=before, handled=(2,)) as (process, child, *_):
        os.killpg(process.pid, signal.SIGHUP)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "SIGINT\n"
        assert state(child) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="the terminal is made as Linux does")
def test_terminal_is_read_written_and_interrupts():
    """Lines typed into a terminal whose foreground group is the command's; Ctrl-C comes from the terminal itself."""
    work = "print(sys.stdin.isatty(), sys.stderr.isatty(), os.get_terminal_size(2).columns); " + WAIT
    line = [sys.executable, "-c", COMMAND.format(work=work, before=""), str(int(signal.SIGINT))]
    spawn = [sys.executable, "-c", f"import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn({line!r})))"]
    with subprocess.Popen(spawn, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        output = b""
        for expected, typed in ((b"True True", b"\x03"), (b"SIGINT", b"typed\n"), (b"read typed", b"")):
            deadline = time.monotonic() + 20
            while expected not in output:
                assert time.monotonic() < deadline, output
                if select.select([process.stdout], [], [], 1)[0]:
                    output += os.read(process.stdout.fileno(), 1000)
            os.write(process.stdin.fileno(), typed)
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


HOSTILE = "a\x1b]0;title\x07\x1b[2J\x1b[31m\x9b1m\u202eb\rc\bd\x7f\x00\udc80"
CODE = "import sys; from declutr.common.console.terminal import answered, shown\nwith shown():\n    {}"
LOGGED = "import sys; from declutr.common.console.logs import setup_logging, get_logger; setup_logging('x'); {}; "
LOGGED += "get_logger().info('\u2713')"


def test_control_characters_are_visible_everywhere_and_bars_stay_what_they_are(capsys):
    with shown():
        sys.stdout.write(f"{HOSTILE}\n")
        sys.stdout.writelines([HOSTILE, "\n"])
        sys.stderr.write(f"{HOSTILE}\n")
        setup_logging("test")
        get_logger().warning("%s", HOSTILE)
    for text in capsys.readouterr():
        for line in text.replace("\x1b[31m", "⟨U+001B⟩[31m").splitlines():  # a colour changes nothing on standard error
            assert visible(HOSTILE) in line
            assert line.isprintable()
    bars = "\r 50%|#####     |", "\r100%|##########|\n"
    with shown():
        for text in bars:
            sys.stderr.write(text)
    assert capsys.readouterr().err == "".join(bars)


def test_the_reset_of_colours_at_the_end_of_a_process_leaves_no_trace():
    """In a pseudo-terminal, because colorama writes to nothing else."""
    colorama = Path(find_spec("ray").submodule_search_locations[0]) / "thirdparty_files"
    imports = f"import sys; sys.path.append({str(colorama)!r}); import colorama"
    code = f"{imports}\n{CODE.format('colorama.init(strip=False); print(chr(100))')}"
    reader, terminal = os.openpty()
    run_python("-c", code, stdout=terminal, capture_output=False, timeout=60)
    os.close(terminal)
    assert os.read(reader, 1000) == b"d\r\n"
    os.close(reader)


@pytest.mark.parametrize("code", [CODE, LOGGED], ids=["shown", "logged"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_an_encoding_lacks_are_escaped(encoding, code):
    text = code.format("print('\\u2026 \\u2013'); sys.stderr.write('\\u2713')")
    done = run_python("-c", text, env={"PYTHONIOENCODING": encoding}, text=False)
    for stream, escaped in ((done.stdout, b"\\u2026"), (done.stderr, b"\\u2713")):
        assert (escaped in stream) == (encoding != "utf-8")


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_has_gone_ends_the_command_without_a_word(lines):
    """One line fits into the buffer, and meets the closed pipe at the end; many meet it on their way."""
    code = CODE.format(f"answered(lambda: print('\\n'.join(map(str, range({lines})))))()\n    print('x')")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        process = subprocess.Popen([sys.executable, "-c", code], env=environment(), stdout=pipe, stderr=subprocess.PIPE)
    assert process.communicate()[1] == b""
    assert process.returncode == 141


WORK = """
import sys
from declutr.common.console.logs import bar, get_logger, setup_logging
setup_logging("work")
print("first", flush=True)
sys.stdin.readline()
with bar(total=3, desc="work", unit="step") as shown:
    for number in range(3):
        shown.update()
        shown.refresh()
        get_logger().info("step %d", number)
        print("step", number, flush=True)
        sys.stderr.writelines(["a line\\n"])
        sys.stdout.writelines(["a line\\n"])
open(sys.argv[1], "w").write("done")
"""


@pytest.mark.parametrize("closed", ["stdout", "stderr", "both"])
def test_work_goes_on_when_nobody_reads(tmp_path, closed):
    """As in `train 2>&1 | head -1`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    pipes["stderr"] = subprocess.STDOUT if closed == "both" else subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", WORK, str(tmp_path / "end")], **pipes)
    if closed == "stderr":
        process.stderr.close()
    else:
        assert process.stdout.readline() == b"first\n"
        process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.wait(60) == 0
    assert (tmp_path / "end").read_text() == "done"


def test_a_bar_in_a_file_is_a_line_a_minute(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(logs, "Lines", partial(logs.Lines, clock=lambda: now[0]))
    with logs.bar(total=300, desc="train", unit="step") as progress:
        for step in range(300):
            now[0] = float(step + 1)
            progress.n = step + 1
            progress.set_postfix_str(f"loss {step}")
    *lines, last = capsys.readouterr().err.split("\n")
    assert ["20%" in lines[0], "100%" in lines[-1], last] == [True, True, ""]
    assert 5 <= len(lines) <= 6
    assert all("train" in line and "\r" not in line and "\x1b" not in line for line in lines)
