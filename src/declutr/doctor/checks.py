"""Judgements of nodes' facts: pure comparisons, one check each."""

from collections import Counter
from collections.abc import Mapping

from declutr.doctor.facts import Facts
from declutr.doctor.finding import EVERYWHERE, Finding, make_finding
from declutr.doctor.needs import Needs

_SOFT = ("CUDA driver",)  # may differ without stopping a run
_BUSY_MIB, _BUSY_PERCENT = 1024, 10
_FEW_FILES, _FILES = 1024, 8192
_FULL, _NEARLY_FULL = 0.95, 0.85  # Ray refuses to write above the first
_STORE_SHARE, _STORE_MOST_MIB = 0.3, 200_000  # Ray's default object store, as a share of the memory
_SKEW_WARN, _SKEW_FAIL = 1.0, 300.0

Nodes = Mapping[str, Facts]


def versions(nodes: Nodes) -> list[Finding]:
    """Check that all nodes have the same software; name differences with their nodes."""
    findings = []
    for part in sorted({part for facts in nodes.values() for part in facts.versions}):
        found = {node: facts.versions.get(part, "none") for node, facts in nodes.items()}
        absent = [node for node, value in found.items() if value == "not installed"]
        findings.append(
            make_finding(
                f"version of {part}", EVERYWHERE, _by_value(found),
                limit="the same on all nodes" if len(found) > 1 else "",
                fail=bool(absent) or (len(set(found.values())) > 1 and part not in _SOFT),
                warn=len(set(found.values())) > 1,
                remedy="install the same versions on every node: `make setup` from the same checkout",
            )
        )  # fmt: skip
    return findings


def settings(nodes: Nodes) -> list[Finding]:
    """Check that RAY_*, NCCL_*, ... are equal in the environment of every node's Ray."""
    names = sorted({name for facts in nodes.values() for name in facts.settings})
    found = {name: {node: facts.settings.get(name, "(not set)") for node, facts in nodes.items()} for name in names}
    apart = {name: values for name, values in found.items() if len(set(values.values())) > 1}
    remedy = "set it before `ray start` on every node, or on no node"
    differing = [
        make_finding(name, EVERYWHERE, _by_value(values), warn=True, remedy=remedy) for name, values in apart.items()
    ]
    return differing or [
        make_finding("settings (RAY_*, NCCL_*, ...)", EVERYWHERE, f"{len(names)} set, the same everywhere")
    ]


def gpus(nodes: Nodes, needs: Needs | None) -> list[Finding]:
    """Check for enough free GPUs of one kind."""
    kinds = {node: _gpu_words(facts) for node, facts in nodes.items()}
    total = sum(len(facts.gpus) for facts in nodes.values())
    wanted = needs.gpus if needs else 0
    idle = needs is not None and needs.wishes_gpus and 0 < total < needs.workers
    findings = [
        make_finding(
            "GPUs", EVERYWHERE, _by_value(kinds), limit=f"{wanted} needed" if wanted else "",
            fail=total < wanted, warn=idle or len({gpu.name for facts in nodes.values() for gpu in facts.gpus}) > 1,
            remedy="use one GPU per worker (scaling.num_workers); with fewer, `device: cuda` waits, `device: auto` "
            "uses CPUs; among different kinds, the slowest sets the pace",
        )
    ]  # fmt: skip
    for node, facts in nodes.items():
        busy = [
            f"GPU {number}: {gpu.used_mib} of {gpu.total_mib} MiB used, {gpu.busy_percent}% busy"
            for number, gpu in enumerate(facts.gpus)
            if gpu.used_mib > _BUSY_MIB or gpu.busy_percent > _BUSY_PERCENT
        ]
        if facts.gpus and facts.versions.get("CUDA of torch") == "None":
            told = f"torch {facts.versions.get('torch')} is a build for CPUs, which cannot use them"
            remedy = "install a build of torch for CUDA: make setup TORCH=torch"
            findings.append(make_finding("torch", node, told, fail=True, remedy=remedy))
        if facts.gpus:
            remedy = "another program uses it (`nvidia-smi`): wait, or start Ray with fewer GPUs"
            findings.append(make_finding("GPUs free", node, "; ".join(busy) or "yes", warn=bool(busy), remedy=remedy))
    return findings


def _gpu_words(facts: Facts) -> str:
    counted = Counter(f"{gpu.name} {gpu.total_mib} MiB" for gpu in facts.gpus)
    return ", ".join(f"{number} x {name}" for name, number in counted.items()) or "none"


def memory(node: str, facts: Facts, needs: Needs | None, nodes: int) -> Finding:
    """Check the memory for weights, gradients and moments of a node's workers."""
    least = 0
    if needs:
        least = (needs.worker_bytes >> 20) * -(-needs.workers // nodes)
    return make_finding(
        "memory", node, f"{facts.ram_free_mib} of {facts.ram_mib} MiB free",
        limit=f"{least} MiB for weights, gradients and moments of its workers" if least else "",
        fail=least > facts.ram_mib, warn=least > facts.ram_free_mib,
        remedy="use fewer workers per node, or scaling.fsdp",
    )  # fmt: skip


def object_store(node: str, facts: Facts, store_mib: int | None) -> Finding:
    """Check that the file system of Ray's objects holds as many as Ray was configured for."""
    size = store_mib or min(int(facts.ram_mib * _STORE_SHARE), _STORE_MOST_MIB)
    return make_finding(
        "/dev/shm", node, f"{facts.shm_mib} MiB", limit=f"object store of {size} MiB", warn=facts.shm_mib < size,
        remedy="Ray then keeps objects on a slow disk: use a larger /dev/shm (docker run --shm-size), or "
        "`ray start --object-store-memory`",
    )  # fmt: skip


def open_files(node: str, facts: Facts) -> Finding:
    """Check the limit of file descriptors: each worker, connection and shard uses some."""
    return make_finding(
        "open files", node, "unlimited" if facts.open_files < 0 else str(facts.open_files), limit=f"{_FILES} or more",
        fail=0 <= facts.open_files < _FEW_FILES, warn=0 <= facts.open_files < _FILES,
        remedy="run `ulimit -n 65536` before `ray start`",
    )  # fmt: skip


def session_disk(node: str, facts: Facts) -> Finding:
    """Check the space for logs and spilled objects."""
    return make_finding(
        "Ray's session folder", node,
        f"{facts.session_folder}: {facts.session_free_mib / 1024:.1f} GiB free, {facts.session_used_share:.0%} used",
        limit=f"{_FULL:.0%}; above, Ray refuses to write", fail=facts.session_used_share > _FULL,
        warn=facts.session_used_share > _NEARLY_FULL,
        remedy="free space there, or use `ray start --temp-dir` on another disk",
    )  # fmt: skip


def clock(node: str, offset_seconds: float, uncertain_seconds: float) -> Finding:
    """Compare the node's clock with the driver's, within the uncertainty of a call."""
    apart = max(0.0, abs(offset_seconds) - uncertain_seconds)
    return make_finding(
        "clock", node, f"{offset_seconds:+.3f} s, uncertain by {uncertain_seconds:.3f} s",
        limit=f"{_SKEW_WARN:.0f} s",
        fail=apart > _SKEW_FAIL, warn=apart > _SKEW_WARN,
        remedy="enable time synchronisation (chrony, systemd-timesyncd), else times in metrics and logs disagree, and "
        "object stores refuse requests",
    )  # fmt: skip


def cpus(of_nodes: Mapping[str, float], needs: Needs, own_session: bool) -> Finding:
    """Check that the workers fit, with CPUs left for the tasks that read for them.

    Args:
        of_nodes: CPUs that Ray (or the machine, before a session is started) has, by node.
        needs: needs of the run.
        own_session: whether the run will start the session, which then declares as many CPUs as it needs.
    """
    total, places = sum(of_nodes.values()), sum(int(cpus // needs.cpus_per_worker) for cpus in of_nodes.values())
    short = total < needs.cpus or places < needs.workers
    return make_finding(
        "CPUs", EVERYWHERE, f"{total:g} on {len(of_nodes)} node(s), room for {places} workers",
        limit=f"{needs.workers} workers x {needs.cpus_per_worker} + {needs.data_cpus} for reading = {needs.cpus}",
        fail=short and not own_session, warn=short,
        remedy="processes share cores, which is slow: use fewer workers" if own_session else
        "the run would wait for ever without a message: lower scaling.num_workers or cpus_per_worker, add nodes, or "
        "set more CPUs with `ray start --num-cpus`",
    )  # fmt: skip


def _by_value(found: Mapping[str, str]) -> str:
    """Show one value if all agree, else each value with its nodes."""
    nodes: dict[str, list[str]] = {}
    for node, value in found.items():
        nodes.setdefault(value, []).append(node)
    if len(nodes) == 1:
        return next(iter(nodes))
    return "; ".join(f"{value} on {', '.join(who)}" for value, who in nodes.items())
