"""The changes that a command makes to files, in order, and what is left when it is killed before each of them.

The command is a real process with real files; its own calls of `os` are written down before they are made.
"""

import json
from pathlib import Path

import pytest
from processes import run_python

_RECORDER = """
import json, os, sys
from pathlib import Path

def _name(path, dir_fd=None):
    base = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
    return os.path.relpath(os.path.join(base, os.fspath(path)), here)

def record(call, of):
    real = getattr(os, call)
    def recorded(*arguments, **options):
        if len(calls) == kill_before:
            os._exit(9)
        names = of(*arguments, **options)
        result = real(*arguments, **options)
        calls.append([call, *names])
        return result
    setattr(os, call, recorded)

top, calls, kill_before = Path(sys.argv[1]), [], -1
"""
_RUNS = """
real_readlink = os.readlink
for call in ("rename", "replace"):
    record(call, lambda old, new: [_name(old), _name(new)])
for call in ("unlink", "rmdir"):
    record(call, lambda path, dir_fd=None: [_name(path, dir_fd)])
record("fsync", lambda handle: [_name(real_readlink(f"/proc/self/fd/{handle}"))])

for number in range(int(sys.argv[2])):
    here = top / str(number)
    here.mkdir()
    prepare(here)
    calls.clear()
    child = os.fork()
    if not child:
        kill_before = -1 if number == 0 else number - 1
        act(here)
        print(json.dumps(calls), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def _run(code, folder, times):
    """The calls of a whole `act`, after which it runs again, killed before its first call, its second, and so on."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to name the files")
    folder.mkdir(exist_ok=True)
    return json.loads(run_python("-c", _RECORDER + code + _RUNS, folder.resolve(), times, timeout=120).stdout)


def disk_calls(code, folder):
    """Renames, deletions and fsyncs of `act(here)` after `prepare(here)`, which `code` defines, with their paths."""
    return _run(code, folder, 1)


def killed_before_each(code, folder):
    """The folders of `act`, killed before its first call, its second, and so on; none is finished."""
    number = len(disk_calls(code, folder / "whole"))
    _run(code, folder / "killed", number + 1)
    return [folder / "killed" / str(place) for place in range(1, number + 1)]
