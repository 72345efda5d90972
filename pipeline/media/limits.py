"""Bounds of the memory and the time of one decode."""

import resource
import signal
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
TOO_MUCH_MEMORY = "too_much_memory"
TOO_SLOW = "too_slow"
OUT_OF_MEMORY = 3
"""Exit status of a process that reached its limit of memory."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one decode; an image or clip beyond them is a failure."""

    memory_mib: int = 1280
    """Memory of the process that decodes, in addition to its libraries. A progressive JPEG of the most pixels needs
    0.9 GiB."""
    cpu_seconds: float = 20.0
    """Time of the processor."""


LIMITS = Limits()


def limit_memory(limits: Limits) -> None:
    """Limits the memory of this process to that in use now and `memory_mib` more; not on macOS, which cannot."""
    if not Path("/proc/self/statm").exists():
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + limits.memory_mib * MIB
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def limit_time(limits: Limits) -> None:
    """Ends this process by SIGPROF when it has used `cpu_seconds` of the processor from now on."""
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
