"""`declutr doctor [CONFIG]`: checks that this machine can run a training, and names the remedies."""

import fcntl
import ipaddress
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from declutr.common.config import load_config
from declutr.common.console.terminal import Parser, excerpt
from declutr.common.errors import ConfigError
from declutr.common.paths import expand, folder_problem
from declutr.common.storage import fsync_path

# torch, transformers and the settings of a training take seconds to import: `--help` answers without them.
if TYPE_CHECKING:
    from declutr.trainer.config import TrainConfig
    from declutr.trainer.run import RunPlan

_SHOWN = ("ray", "torch", "transformers", "pyarrow", "numpy")
_SMI_FIELDS = "name,memory.total,memory.used,utilization.gpu,driver_version"
_SMI_SECONDS = 20
_BUSY_MIB, _BUSY_PERCENT = 1024, 10  # memory and time of a GPU that another process uses
_SYNC_LIMIT_MS = 100.0  # of an fsync, above which every checkpoint waits for the disk
_REPLACES = 50  # renames during which a file is read
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_WEIGHT_BYTES, _MOMENTS_BYTES = 4, 8  # of a parameter; AdamW's two moments are float32
_RAY_PROCESSES = {  # parts of the command line, kind
    "dashboard/dashboard.py": "dashboard", "util.client.server": "Ray client", "gcs_server": "gcs",
    "raylet": "raylet", "agent.py": "agent", "ray::": "worker", "default_worker.py": "worker",
}  # fmt: skip
# A second process, because on NFS the kernel keeps a lock for each process, not for each open file.
_LOCK_AGAIN = "import fcntl,sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"


@dataclass(frozen=True)
class Finding:
    """Value of one check, and the remedy if a run would work slowly (warn), or stop or be open to others (FAIL)."""

    name: str
    status: Literal["ok", "warn", "FAIL"]
    value: str
    limit: str = ""
    remedy: str = ""

    def line(self) -> str:
        """Format the finding as a line, with its remedy below."""
        first = f"{self.status:4s}  {self.name}: {self.value}" + (f" ({self.limit})" if self.limit else "")
        return f"{first}\n{'':6s}-> {self.remedy}" if self.remedy else first


def judge(name: str, value: str, limit: str = "", *, fail: bool = False, warn: bool = False, remedy: str) -> Finding:
    """Make a finding; its remedy is kept only if something must be fixed."""
    return Finding(name, "FAIL" if fail else "warn" if warn else "ok", value, limit, remedy if fail or warn else "")


@dataclass(frozen=True)
class Needs:
    """Needs of a run, computed from its configuration without loading weights."""

    parameters: int  # parameters of encoder, projection, objectives and frontends
    checkpoint_bytes: int  # size of a checkpoint: weights and moments
    disk_bytes: int  # Maximum size of its checkpoints: the last ones, milestones, the best, and the one being written
    memory_mib: int  # memory of this machine's workers for weights, gradients and moments, without activations
    workers: int  # processes that train on this machine
    device: str  # `scaling.device`


def needs_of(plan: "RunPlan", workers: int) -> Needs:
    """Compute the needs of a run without problems, with this number of its workers on this machine."""
    from declutr.trainer.build import parameter_counts  # loads torch

    config, saving = plan.config, plan.config.checkpoint
    encoder, *tasks = parameter_counts(plan)
    parameters = encoder + sum(tasks)
    # Tasks with alternating updates have an optimizer each, with moments of the encoder.
    moments = _MOMENTS_BYTES * (parameters + encoder * (0 if config.task_schedule == "joint" else len(tasks) - 1))
    milestones = plan.total_steps // saving.keep_every_steps if saving.keep_every_steps else 0
    checkpoints = saving.keep_last + 1 + milestones + bool(config.validation.every_steps)
    size = parameters * _WEIGHT_BYTES + moments
    memory_mib = ((size + parameters * _WEIGHT_BYTES) >> 20) * workers  # and the gradients
    return Needs(parameters, size, size * checkpoints, memory_mib, workers, config.scaling.device)


def examine(config: "TrainConfig | None", paths: Sequence[str]) -> list[Finding]:
    """Collect all findings on this machine, of a planned run if a config is given, and on folders it will write to."""
    import torch

    address = (config and config.scaling.address) or os.environ.get("RAY_ADDRESS") or "local"
    # A node of a cluster holds at least one worker; how many, Ray decides.
    workers = config.scaling.least_workers if config and address == "local" else 1
    needs, findings = _of_config(config, workers) if config else (None, [])
    if address != "local":
        findings.append(Finding("cluster", "ok", f"{address}: only this node is checked; `ray status` lists all nodes"))
    memory, interfaces = psutil.virtual_memory(), [entry for own in psutil.net_if_addrs().values() for entry in own]
    addresses = {entry.address.partition("%")[0] for entry in interfaces if entry.family in _FAMILIES}
    findings += [
        check_versions(),
        *check_gpus(ask_smi(), torch.__version__, torch.version.cuda, needs),
        check_memory(memory.total >> 20, memory.available >> 20, needs),
        check_ports(ray_ports(), addresses, os.environ.get("RAY_AUTH_MODE") == "token"),
    ]
    for path in dict.fromkeys([*([config.run] if config else []), *paths]):
        findings += check_folder(path, needs.disk_bytes if config and needs and path == config.run else 0)
    return findings


def _of_config(config: "TrainConfig", workers: int) -> tuple[Needs | None, list[Finding]]:
    """Findings about the configuration itself: everything that `train` would refuse before it starts."""
    from declutr.trainer.driver.checks import load_problems, resolve

    try:
        plan = resolve(config)
        problems = load_problems(plan)
    except ConfigError as error:
        problems = error.problems
    if problems:
        remedy = "correct the setting; `declutr train` refuses it as well"
        return None, [judge("configuration", problem, fail=True, remedy=remedy) for problem in problems]
    needs = needs_of(plan, workers)
    text = f"{needs.parameters / 1e6:.1f} million parameters, {needs.checkpoint_bytes / 2**30:.2f} GiB per checkpoint"
    return needs, [Finding("configuration", "ok", text)]


def check_versions() -> Finding:
    """Check the installed packages against what this package requires."""
    installed = {canonicalize_name(package.name): package for package in distributions()}
    own = installed.get(canonicalize_name("declutr-ray"))
    wrong = [] if own else ["declutr-ray is not installed"]
    for requirement in map(Requirement, own.requires or [] if own else []):
        package = installed.get(canonicalize_name(requirement.name))
        # extras are optional
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if package is None or not requirement.specifier.contains(package.version, prereleases=True):
            wrong.append(f"{requirement} is needed, {package.version if package else 'nothing'} is installed")
    versions = [f"{name} {installed[name].version}" for name in map(canonicalize_name, _SHOWN) if name in installed]
    text = "; ".join(wrong) or ", ".join([f"python {platform.python_version()}", *versions])
    return judge("versions", text, fail=bool(wrong), remedy="install again: `make setup`, or pip install -e .")


def ask_smi() -> str | None:
    """Name, MiB in all, MiB used, percent busy and driver of each GPU, one a line; None if it does not answer."""
    words = ["nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True).stdout
    except FileNotFoundError:
        return ""  # no driver, so no GPU
    except (subprocess.SubprocessError, OSError):
        return None


def check_gpus(answer: str | None, torch_version: str, cuda_of_torch: str | None, needs: Needs | None) -> list[Finding]:
    """Check for enough free GPUs that torch can use; `answer` is that of `ask_smi`."""
    device, workers = (needs.device, needs.workers) if needs else ("", 0)
    if answer is None:
        text, cuda = f"nvidia-smi gave no answer in {_SMI_SECONDS} s, or an error", device == "cuda"
        return [judge("GPUs", text, fail=cuda, warn=True, remedy="run `nvidia-smi`, and install the driver again")]
    rows = [[part.strip() for part in line.split(",")] for line in answer.splitlines()]
    kinds = Counter(f"{name} {total} MiB, driver {driver}" for name, total, _, _, driver in rows)
    remedy = "use one GPU per worker (scaling.num_workers); with fewer, `device: cuda` waits, `device: auto` uses CPUs"
    value = excerpt([f"{number} x {kind}" for kind, number in kinds.items()]) or "none"
    few, limit = len(rows) < workers, f"{workers} needed" if device == "cuda" else ""
    warn = device == "auto" and bool(rows) and few
    findings = [judge("GPUs", value, limit, fail=device == "cuda" and few, warn=warn, remedy=remedy)]
    if rows and cuda_of_torch is None:
        text = f"torch {torch_version} is a build for CPUs, which cannot use them"
        remedy = "install a build of torch for CUDA: make setup TORCH=torch"
        findings.append(judge("torch", text, fail=True, remedy=remedy))
    busy = [
        f"GPU {number}: {used} of {total} MiB used, {percent}% busy"
        for number, (_, total, used, percent, _) in enumerate(rows)
        # nvidia-smi writes [N/A] for what a GPU does not tell
        if (used.isdigit() and int(used) > _BUSY_MIB) or (percent.isdigit() and int(percent) > _BUSY_PERCENT)
    ]
    if rows:
        remedy = "another program uses it (`nvidia-smi`): wait, or start Ray with fewer GPUs"
        findings.append(judge("GPUs free", "; ".join(busy) or "yes", warn=bool(busy), remedy=remedy))
    return findings


def check_memory(total_mib: int, free_mib: int, needs: Needs | None) -> Finding:
    """Check the memory for weights, gradients and moments of this machine's workers."""
    needed_mib = needs.memory_mib if needs else 0
    limit = f"{needed_mib} MiB for weights, gradients and moments of {needs.workers} worker(s)" if needs else ""
    value, tight = f"{free_mib} of {total_mib} MiB free", needed_mib > free_mib
    remedy = "use fewer workers per node, or scaling.fsdp; `declutr train CONFIG --plan` measures a few steps"
    return judge("memory", value, limit, fail=needed_mib > total_mib, warn=tight, remedy=remedy)


def ray_ports() -> list[tuple[str, str, int]] | None:
    """Kind of process, address and port of each port on which Ray listens; None if this user may not see them."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return None
    ports = set[tuple[str, str, int]]()
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or connection.pid is None:
            continue
        try:
            command = " ".join(psutil.Process(connection.pid).cmdline())
        except psutil.Error:  # it has ended, or belongs to another user
            continue
        kind = next((kind for part, kind in _RAY_PROCESSES.items() if part in command), None)
        if kind == "dashboard" and "--host=127.0.0.1" in command:
            kind = "metrics"  # they are still published to all; code cannot be run through that port
        if kind and "ray" in command:
            ports.add((kind, connection.laddr.ip, connection.laddr.port))
    return sorted(ports)


def check_ports(ports: Sequence[tuple[str, str, int]] | None, addresses: set[str], guarded: bool) -> Finding:
    """Check whether a Ray port listens on a public address; `guarded`: clients need a token."""
    name, limit = "ports open to others", "no public address, and no dashboard reachable from other hosts"
    if ports is None:
        return judge(name, "not visible to this user", warn=True, remedy="run doctor as the user who started Ray")
    public = sorted(address for address in addresses if ipaddress.ip_address(address).is_global)
    wide = [port for port in ports if port[1] in ("0.0.0.0", "::", *public)]
    runs_code = [port for port in wide if port[0] in ("dashboard", "Ray client")]
    texts = [f"{kind} {address}:{port}" for kind, address, port in sorted(wide, key=lambda port: port not in runs_code)]
    value = f"{len(wide)}, to this network only" if wide else "none"
    if wide and (public or runs_code):
        value = excerpt(texts, 4) + (f" on {', '.join(public)}" if public else "")
    remedy = (
        "start Ray with --dashboard-host=127.0.0.1 and --node-ip-address=PRIVATE_ADDRESS, close these ports in the "
        "firewall or security group, and turn tokens on (RAY_AUTH_MODE=token before every `ray start` and command)"
    )
    warn = bool((wide and public) or (runs_code and not guarded))
    return judge(name, value, limit, fail=bool(wide and public and not guarded), warn=warn, remedy=remedy)


def check_folder(place: str, needed_bytes: int) -> list[Finding]:
    """Test what a run relies on: write, rename, lock, room for checkpoints; at an address, write and read.

    A folder that does not exist is tested at its nearest parent, because a run creates it.
    """
    from declutr.common.stores.address import is_remote
    from declutr.common.stores.folder import Folder

    try:
        if is_remote(place):
            folder, file = Folder(place, retry_seconds=0.0), f".declutr-doctor-{time.time_ns()}"
            content = os.urandom(16)
            folder.put(file, content)
            same = folder.read(file) == content
            folder.delete(file)
            return [judge(f"{place} writable", "yes" if same else "altered", fail=not same, remedy="use another store")]
        if problem := folder_problem(parent := expand(place).absolute()):
            return [judge(f"{place} writable", problem, fail=True, remedy="name a folder that this user can write to")]
        parent = next(folder for folder in (parent, *parent.parents) if folder.exists())
        with tempfile.TemporaryDirectory(prefix=".declutr-doctor-", dir=parent) as own:
            return _findings_in(place, Path(own), needed_bytes)
    except (OSError, ValueError) as error:
        remedy = "mount or create it, writable for this user; an address needs credentials and the store's endpoint"
        return [judge(f"{place} writable", str(error), fail=True, remedy=remedy)]


def _findings_in(place: str, own: Path, needed_bytes: int) -> list[Finding]:
    """Test a local place in a new folder `own` inside it."""
    (own / "sync").write_bytes(bytes(4096))
    began = time.perf_counter()
    fsync_path(own / "sync")
    milliseconds = 1000 * (time.perf_counter() - began)
    torn, free = _torn(own / "whole"), shutil.disk_usage(own).free
    with (own / "sync").open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        again = subprocess.run([sys.executable, "-c", _LOCK_AGAIN, own / "sync"], capture_output=True, check=False)
    refused, tight = b"BlockingIOError" in again.stderr, free < 2 * needed_bytes
    written = f"{own.parent}, 4 KiB forced to the disk in {milliseconds:.1f} ms"
    needed = f"needs {needed_bytes / 2**30:.2f} GiB for the checkpoints" if needed_bytes else ""
    slow = "checkpoints and shards wait for the disk several times each: use a faster disk for `run`"
    half = "renames are not atomic here, so half-written checkpoints could be read: use another disk"
    twice = "two commands could train one run: mount the folder with locks (NFS: without nolock)"
    more = "free space there, use another folder, lower checkpoint.keep_last, or raise keep_every_steps"
    limit, renamed = f"{_SYNC_LIMIT_MS:.0f} ms", f"{torn} torn reads" if torn else "whole"
    return [
        judge(f"{place} writable", written, limit, warn=milliseconds > _SYNC_LIMIT_MS, remedy=slow),
        judge(f"{place} rename", renamed, fail=torn > 0, remedy=half),
        judge(f"{place} lock", "exclusive" if refused else "for two at once", fail=not refused, remedy=twice),
        judge(
            f"{place} space", f"{free / 2**30:.2f} GiB free", needed, fail=free < needed_bytes, warn=tight, remedy=more
        ),
    ]


def _torn(path: Path) -> int:
    """Count reads that see neither the whole old nor the whole new file while a writer replaces it by renaming."""
    contents = (b"a" * 65536, b"b" * 65536)
    path.write_bytes(contents[0])
    torn, aside = 0, path.with_name("aside")

    def replace() -> None:
        for number in range(_REPLACES):
            aside.write_bytes(contents[number % 2])
            aside.replace(path)

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(replace)
        while not writer.done():
            try:
                torn += path.read_bytes() not in contents
            except OSError:
                torn += 1
        writer.result()
    return torn


def main(argv: Sequence[str] | None = None) -> int:
    """Run `doctor [CONFIG] [--path ...] [--json]`; return 1 if something must be fixed."""
    parser = Parser(prog="declutr doctor", description="Check this machine before a run.")
    parser.add_argument("config", nargs="?", help="YAML file with the `train` section of the planned run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of that section to change")
    parser.add_argument("--path", action="append", default=[], help="folder that runs will write to; repeatable")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_intermixed_args(argv)
    config = None
    if options.config is not None:
        from declutr.trainer.config import TrainConfig

        config = load_config(options.config, "train", TrainConfig, options.overrides)
    findings = examine(config, options.path)
    counts = {status: sum(finding.status == status for finding in findings) for status in ("ok", "warn", "FAIL")}
    lines = [finding.line() for finding in findings]
    lines.append(f"{counts['ok']} ok, {counts['warn']} to check (warn), {counts['FAIL']} to fix (FAIL)")
    report = {"findings": [asdict(finding) for finding in findings], "counts": counts}
    print(json.dumps(report, indent=2) if options.json else "\n".join(lines))
    return int(counts["FAIL"] > 0)
