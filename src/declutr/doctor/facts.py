"""Facts about a node: versions, processors, memory, limits. They are gathered here and judged elsewhere."""

import hashlib
import os
import platform
import resource
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

PACKAGES = ("ray", "torch", "transformers", "pyarrow", "safetensors", "numpy", "declutr-ray")
_CODE = ("common", "pipeline", "trainer", "doctor")
_ROOT = Path(__file__).resolve().parents[1]
_SMI_FIELDS = "name,memory.total,memory.used,utilization.gpu,driver_version"
_SMI_SECONDS = 20
_PREFIXES = ("RAY_", "NCCL_", "GLOO_", "TORCH_", "OMP_NUM_THREADS", "CUBLAS_")
# Settings of Ray for each node or process, which differ legitimately.
_OWN_SETTINGS = (
    *("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_NODE_ID", "RAY_OVERRIDE_NODE_ID_FOR_TESTING", "RAY_ADDRESS"),
    *("RAY_CLIENT_MODE", "RAY_HEAD_IP", "RAY_WORKER_ID", "RAY_SESSION_DIR", "RAY_GCS_PORT"),
)
_SECRETS = ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "_KEY")


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver describes it; memory in MiB. `used_mib` and `busy_percent` count all users."""

    name: str
    total_mib: int
    used_mib: int
    busy_percent: int


@dataclass(frozen=True)
class Facts:
    """Facts about a node.

    Attributes:
        versions: versions of the interpreter, packages, the code of this project, CUDA and its driver.
        gpus: GPUs listed by nvidia-smi; empty if there are none.
        cpus: processors that this process may use.
        ram_mib: total memory.
        ram_free_mib: memory available without swapping.
        shm_mib: size of the file system that holds Ray's object store.
        session_folder: folder where Ray writes logs and spills objects.
        session_free_mib: free space there.
        session_used_share: used part of that disk, 0 to 1.
        open_files: limit of file descriptors per process.
        settings: environment of Ray's processes that changes the behaviour of Ray and torch; secrets as a hash.
    """

    versions: dict[str, str]
    gpus: tuple[Gpu, ...]
    cpus: int
    ram_mib: int
    ram_free_mib: int
    shm_mib: int
    session_folder: str
    session_free_mib: int
    session_used_share: float
    open_files: int
    settings: dict[str, str]


def gather() -> Facts:
    """Gather the facts of this machine."""
    session_folder, shm = _folders()
    gpus, driver = _gpus()
    memory = psutil.virtual_memory()
    disk = shutil.disk_usage(nearest_existing(Path(session_folder)))
    return Facts(
        versions=_versions() | ({"CUDA driver": driver} if driver else {}),
        gpus=gpus,
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        ram_mib=memory.total >> 20,
        ram_free_mib=memory.available >> 20,
        shm_mib=shutil.disk_usage(shm).total >> 20 if Path(shm).is_dir() else 0,
        session_folder=session_folder,
        session_free_mib=disk.free >> 20,
        session_used_share=disk.used / max(1, disk.used + disk.free),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        settings=settings(ray_environment()),
    )


def ray_environment() -> dict[str, str]:
    """Environment with which this node's Ray was started; without Ray, this process's own.

    A worker's environment is that of the driver if a job sets it, so the raylet's is read.
    """
    raylet = os.environ.get("RAY_RAYLET_PID")
    if raylet is None:
        return dict(os.environ)
    try:
        return dict(psutil.Process(int(raylet)).environ())
    except psutil.Error:  # it belongs to another user: our own is the best substitute
        return dict(os.environ)


def _folders() -> tuple[str, str]:
    """Session folder and object store from this node's raylet, else Ray's defaults."""
    given = dict.fromkeys(("--session_dir", "--plasma_directory"), "")
    if "RAY_RAYLET_PID" in os.environ:
        try:
            words = psutil.Process(int(os.environ["RAY_RAYLET_PID"])).cmdline()
        except psutil.Error:  # it belongs to another user
            words = []
        given |= {name: value for name, _, value in (word.partition("=") for word in words) if name in given}
    return given["--session_dir"] or "/tmp/ray", given["--plasma_directory"] or "/dev/shm"


def settings(environment: dict[str, str]) -> dict[str, str]:
    """Part of an environment that Ray, NCCL, gloo and torch read."""
    return {
        name: _hidden(value) if any(secret in name for secret in _SECRETS) else value
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIXES) and name not in _OWN_SETTINGS
    }


def _hidden(value: str) -> str:
    return f"(hash {hashlib.sha256(value.encode()).hexdigest()[:8]})"


def nearest_existing(path: Path) -> Path:
    """Find the path, or its nearest existing parent."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _versions() -> dict[str, str]:
    import torch

    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found | {"torch": torch.__version__, "CUDA of torch": str(torch.version.cuda), "code": code_hash(_ROOT)}


def code_hash(root: Path) -> str:
    """Hash of the source of this project, because different checkouts can have the same version."""
    digest = hashlib.sha256()
    for package in _CODE:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """List GPUs and the driver's version, without using a GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return (), ""
    try:
        answer = subprocess.run(
            [command, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=_SMI_SECONDS, check=True,
        ).stdout  # fmt: skip
    except (subprocess.SubprocessError, OSError):
        return (), "nvidia-smi does not answer"
    return parse_smi(answer)


def parse_smi(answer: str) -> tuple[tuple[Gpu, ...], str]:
    """Parse GPUs and driver version from nvidia-smi's lines; missing values ("[N/A]") count as 0."""
    gpus, driver = [], ""
    for line in answer.splitlines():
        name, *numbers, driver = (part.strip() for part in line.split(","))
        total, used, busy = (int(number) if number.isdigit() else 0 for number in numbers)
        gpus.append(Gpu(name, total, used, busy))
    return tuple(gpus), driver
