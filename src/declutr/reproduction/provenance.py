"""Facts that a published number must carry: hardware, versions, commit, command, and the load of the machine."""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    *("torch", "transformers", "numpy", "pyarrow", "pytorch-metric-learning", "sentence-transformers"),
    *("ray", "tokenizers", "tiktoken", "datasets", "onnx", "onnxruntime"),
)
_ROOT = Path(__file__).resolve().parents[3]


def facts(
    command: Sequence[str],  # words of the command
    commit: str | None = None,  # of the code, if it does not run in a git checkout
) -> dict[str, Any]:
    """Hardware, versions, commit and command of this process."""
    return {
        "command": " ".join(command),
        "commit": commit or _commit(),
        "hardware": _hardware(),
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in _PACKAGES},
            "torch": torch.__version__,  # including its build, such as +cpu
        },
    }


def lasting_facts() -> dict[str, Any]:
    """Those of this process that are the same for all runs of a machine: without its command and load."""
    now = facts([])
    hardware = {key: value for key, value in now["hardware"].items() if key != "load_average"}
    return {"commit": now["commit"], "versions": now["versions"], "hardware": hardware}


def origins(processes: Sequence[Mapping[str, Any]]) -> str:
    """Hardware and commits of several `facts` as Markdown, each once."""
    hardware = [process["hardware"] for process in processes]
    names = dict.fromkeys(machine["gpu"] or f"{machine['cores']} cores of {machine['cpu']}" for machine in hardware)
    commits = dict.fromkeys(process["commit"] or "unknown" for process in processes)
    return f"*Hardware:* {', '.join(names)}. *Commit:* {', '.join(commits)}."


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of this code; None if it is no checkout, also if it is installed inside another repository."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=_ROOT, check=True, capture_output=True, text=True, timeout=30)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != _ROOT:  # installed inside another repository
            return None
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _hardware() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # macOS has none
    hardware: dict[str, Any] = {
        "cpu": _processor(),
        "cores": usable,
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        memory = round(properties.total_memory / 2**30, 1)
        hardware |= {"gpu": properties.name, "gpu_memory_gib": memory, "cuda": torch.version.cuda}
    return hardware


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
