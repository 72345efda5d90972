"""A command in its own session, so that a signal to its process group reaches the command alone.

`timeout`, Ctrl-C and a closing terminal signal every process of a group. Ray's processes are in the group of the
process that starts them, and SIGTERM ends them before a run is saved. So a command forks before Ray is imported. The
child leads a new session and does the work. The parent stays in the group, forwards signals and ends as the child does.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_LOOK_SECONDS = 1.0
_parent: int | None = None


def end_at_signals() -> None:
    """Ends a command in order at SIGTERM, which ends Ray's processes too, and at signals that would end it alone.

    The exit status is 128 + signal. A signal that is ignored, as SIGHUP under `nohup`, stays ignored.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if number == signal.SIGTERM or signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _exit)


def _exit(number: int, frame: Any) -> NoReturn:  # noqa: ARG001 - the signature of a handler
    signal.alarm(0)  # Ray's handler, which may have run before, ends the process in 3 s
    raise SystemExit(128 + number)


def command_pid() -> int:
    """Process id of the command as its caller knows it: of the parent after `relay`, else of this process."""
    return _parent or os.getpid()


def relay() -> None:
    """Returns in a child process with a new session; this process forwards signals to it and never returns.

    The exit status is that of the child, also death by a signal. The child is killed if this process is killed. A
    signal that is ignored, as SIGHUP under `nohup`, stays ignored; SIGTERM and SIGINT never are. Call it in the main
    thread, before another thread has started.
    """
    global _parent
    numbers: set[int] = {
        number
        for number in _FORWARDED
        if number in (signal.SIGTERM, signal.SIGINT) or signal.getsignal(number) != signal.SIG_IGN
    }
    numbers.add(signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # a signal waits until both processes can take it
    parent = os.getpid()
    child = os.fork()
    if child:
        _forward(child, numbers)
    _parent = parent
    os.setsid()
    end_with(parent)  # no run continues unseen, and the same command can start again at once
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with(
    parent: int,  # process id of the parent
    kernel: bool = sys.platform == "linux",  # true if the kernel can do that; otherwise a thread looks every second
) -> None:
    """Lets this process be killed when its parent has ended."""

    def watch() -> None:
        while not kernel and os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        if os.getppid() != parent:  # also if it ended before the kernel was asked
            os.kill(os.getpid(), signal.SIGKILL)

    if kernel:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        watch()
    else:
        threading.Thread(target=watch, name="declutr-parent", daemon=True).start()


def _forward(child: int, numbers: set[int]) -> NoReturn:
    """Forwards signals until the child has ended; as process 1 of a container it also takes in orphans."""
    signal.signal(signal.SIGCHLD, lambda *_: None)  # macOS discards a signal whose default is to be ignored
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # Ctrl-Z would stop this process alone, while the child works on
    while True:
        number = signal.sigwait(numbers)
        if number == signal.SIGCHLD:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    _end(os.waitstatus_to_exitcode(ended[1]))
        else:
            os.kill(child, number)


def _end(code: int) -> NoReturn:
    """Ends this process with an exit status, or by the signal -`code`."""
    if code < 0:
        number = -code
        if number != signal.SIGKILL:  # it takes no handler
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        code = 128 + number  # process 1 of a container outlives a signal from itself
    os._exit(code)
