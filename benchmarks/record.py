"""Facts that a published number must carry: hardware, versions, commit, command, and the load of the machine."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from declutr.common.storage import write_text

_PACKAGES = (
    *("torch", "transformers", "numpy", "pyarrow", "pytorch-metric-learning", "sentence-transformers"),
    *("ray", "tokenizers", "tiktoken", "datasets"),
)
_ROOT = Path(__file__).resolve().parent.parent


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options of every benchmark."""
    kind = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description, formatter_class=kind)
    made.add_argument("--json", type=Path, metavar="OUT", help="file for the figures, which are also printed")
    made.add_argument("--commit", help="commit of the code, if run outside a git checkout")
    made.add_argument("--seed", type=int, default=0, help="seed of weights, documents, spans and masks")
    return made


def add_device(options: argparse.ArgumentParser) -> None:
    """Add the options of benchmarks that run an encoder."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    options.add_argument("--device", choices=("cpu", "cuda"), default=default)
    options.add_argument("--precision", choices=("fp32", "bf16"), help="default: bf16 on cuda, fp32 on cpu")
    options.add_argument("--spans", type=int, nargs=2, metavar=("MIN", "MAX"), help="tokens per span, no special ones")


def autocast_type(precision: str | None, device: str) -> torch.dtype | None:
    """Type of the forward's matrix products: bfloat16, or None for float32."""
    chosen = precision or ("bf16" if device == "cuda" else "fp32")
    return torch.bfloat16 if chosen == "bf16" else None


def now() -> NDArray[np.float64]:
    """Wall seconds and processor seconds of this process, for differences."""
    return np.array([time.perf_counter(), time.process_time()])


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Quotients of the seconds of two sides that took turns, their median and their range."""
    found = [one / own for one, own in zip(theirs, ours, strict=True)]
    return {
        "ratios": [round(ratio, 4) for ratio in found],
        "ratio_median": round(statistics.median(found), 4),
        "ratio_range": [round(min(found), 4), round(max(found), 4)],
    }


def facts(name: str, commit: str | None) -> dict[str, Any]:
    """Hardware, versions, commit and command of this run."""
    return {
        "command": " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]]),
        "commit": commit or _commit(),
        "hardware": _hardware(),
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in _PACKAGES},
            "torch": torch.__version__,  # including its build, such as +cpu
        },
    }


def figure(value: float, unit: str, kind: Literal["measured", "computed", "assumed"], how: str) -> dict[str, Any]:
    """A number with its kind and origin."""
    return {"value": float(f"{value:.4g}"), "unit": unit, "kind": kind, "how": how}


def publish(figures: dict[str, Any], path: Path | None) -> None:
    """Print the figures, and write them to a file if requested."""
    text = json.dumps(figures, indent=2) + "\n"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    print(text, end="", flush=True)


def progress(line: str) -> None:
    """Print a progress line to stderr."""
    print(line, file=sys.stderr, flush=True)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=_ROOT, check=True, capture_output=True, text=True, timeout=30
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _hardware() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {
        "cpu": _processor(),
        "cores": usable,
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30, 1)}
        found |= {"cuda": torch.version.cuda}
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
