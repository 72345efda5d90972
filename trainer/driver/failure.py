"""Failures of a worker group: a short line with the worker's own error, and Ray's full message for the log file."""

import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import ray
import ray.train
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from declutr.common.console.logs import get_logger
from declutr.trainer.driver.continuation import FAILURES, MOMENT

# Errors of workers whose exchange failed because another worker died.
_COLLATERAL = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|timed out|ncclremoteerror|remote process exited",
    re.IGNORECASE,
)
_NODE_SECONDS = 20.0  # after 15.5 s a head with Ray's defaults has missed a node, after 12 s that of cluster.yaml


@dataclass(frozen=True)
class GroupFailure:
    """A failure of a group before its last step."""

    summary: str  # one line for the user
    kind: str  # key that equal failures share; it contains no pid, address or time
    account: str  # Ray's full error messages
    lost: bool = False  # True if the group's coordinator or Ray itself died, not a worker
    collateral: bool = False  # True if workers report a broken exchange, and Ray no death that broke it

    def log(self, run: Path, step: int) -> None:
        """Appends Ray's messages to the run's `failures.log`, or logs them if that file cannot be written."""
        moment = time.strftime(f"{MOMENT} %z")  # a name of a zone tells no reader its offset
        try:
            with (run / FAILURES).open("a", encoding="utf-8") as stream:
                stream.write(f"=== {moment}, after step {step}: {self.summary}\n{self.account.rstrip()}\n\n")
        except OSError as error:
            get_logger().warning("%s cannot be written (%s):\n%s", run / FAILURES, error.strerror, self.account)


def describe(error: BaseException) -> GroupFailure:
    """Converts an error of `TorchTrainer.fit` to a failure."""
    account = "".join(traceback.format_exception(error))
    if isinstance(error, ray.train.WorkerGroupError):
        return _of_workers(error.worker_failures, account)
    if isinstance(error, ray.train.ControllerError):
        cause = error.controller_failure
        return GroupFailure(
            f"the workers could not be started: {_line(cause)}", f"start {type(cause).__name__}", account
        )
    if isinstance(error, RayActorError):
        return GroupFailure("the process that coordinates the workers died", "coordinator", account, lost=True)
    return GroupFailure(f"Ray: {_line(error)}", type(error).__name__, account, lost=isinstance(error, RayError))


def oom_kills() -> int:
    """Number of processes in any container of this host that its kernel has killed for lack of memory."""
    try:
        counters = Path("/proc/vmstat").read_text().split()
    except FileNotFoundError:  # not Linux
        return 0
    # Linux counts them since 4.13
    return int(counters[counters.index("oom_kill") + 1]) if "oom_kill" in counters else 0


def blame_memory(failure: GroupFailure, kills_before: int) -> GroupFailure:
    """Adds the number of processes of this host that were killed for lack of memory since `kills_before`."""
    kills = oom_kills() - kills_before
    if kills <= 0:
        return failure
    cause = f"the kernel killed {kills} process{'es' if kills > 1 else ''} of this host for lack of memory"
    remedy = "lower microbatch_tokens or scaling.num_workers, or raise the container's memory limit"
    return replace(failure, summary=f"{failure.summary}; {cause}: {remedy}")


def blame_node(failure: GroupFailure, nodes: set[str], wait: Callable[[float], bool]) -> GroupFailure:
    """Adds the hosts of the workers' `nodes` that are gone: an exchange fails at once, Ray misses a node seconds later.

    `wait` pauses for seconds and returns True if the run is to stop, which ends the search.
    """
    deadline = time.monotonic() + _NODE_SECONDS
    while failure.collateral and len(nodes) > 1:
        dead = [node for node in ray.nodes() if node["NodeID"] in nodes and not node["Alive"]]
        if dead:
            hosts = ", ".join(sorted({node["NodeManagerHostname"] for node in dead}))
            return replace(failure, summary=f"{failure.summary}; a worker's node is gone (host {hosts})")
        if time.monotonic() > deadline or wait(0.2):
            break
    return failure


def _of_workers(failures: dict[int, Exception], account: str) -> GroupFailure:
    """Finds the first cause: a worker with an error that no other worker caused, else a dead worker."""
    deaths = {
        rank: error
        for rank, error in failures.items()
        if isinstance(getattr(error, "health_check_failure", error), RayActorError)
        or type(error).__name__ == "WorkerHealthCheckFailedError"  # Ray's class is in a private module
    }
    raised = {rank: error for rank, error in failures.items() if rank not in deaths}
    own = {rank: error for rank, error in raised.items() if not _COLLATERAL.search(str(error))}
    if own and not deaths:
        rank = min(own)
        line = _line(own[rank])
        return GroupFailure(f"worker {rank}: {line}", re.sub(r"\d+", "#", line), account)
    if deaths:
        rank = min(deaths)
        others = f" (and {len(deaths) - 1} more)" if len(deaths) > 1 else ""
        return GroupFailure(f"{_who(rank, deaths[rank])} died{others}{_why(deaths[rank])}", "death", account)
    rank = min(raised)
    return GroupFailure(f"worker {rank} lost the others: {_line(raised[rank])}", "death", account, collateral=True)


def _who(rank: int, error: Exception) -> str:
    """Names the worker, with host and pid if Ray reports them."""
    text = str(error)
    host = re.search(r"hostname='([^']+)'", text) or re.search(r"^\s*ip: (\S+)", text, re.MULTILINE)
    pid = re.search(r"\bpid[=:] ?(\d+)", text)
    return f"worker {rank} (host {host[1]}, pid {pid[1]})" if host and pid else f"worker {rank}"


def _why(error: Exception) -> str:
    """Cause of a worker's death as far as Ray knows it, which is seldom."""
    inner = getattr(error, "health_check_failure", error)  # Ray's error of a check holds the cause
    if isinstance(inner, OutOfMemoryError):
        return ": its node ran out of memory"
    if getattr(inner, "preempted", False) or "its node" in str(inner):
        return ": its node is gone"
    return " (killed, crashed, out of memory, or its node is gone: Ray does not know which)"


def _line(error: BaseException) -> str:
    """Type and message of an error on one line."""
    if isinstance(error, RayTaskError):  # a whole traceback: its last line is the error
        return [line for line in str(error).splitlines() if line.strip()][-1].strip()
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:500]}" if message else type(error).__name__
