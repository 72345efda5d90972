"""Options and figures of benchmarks: every published number carries its hardware, versions, commit and command."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from declutr.common.storage import write_text
from declutr.reproduction import provenance


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
    """Hardware, versions, commit and command of this benchmark."""
    return provenance.facts(["python -m", f"benchmarks.{name}", *sys.argv[1:]], commit)


def figure(value: float, unit: str, kind: Literal["measured", "computed", "assumed"], how: str) -> dict[str, Any]:
    """A number with its kind and origin."""
    return {"value": float(f"{value:.4g}"), "unit": unit, "kind": kind, "how": how}


def publish(figures: dict[str, Any], path: Path | None) -> None:
    """Print the figures, and write them to a file if requested."""
    text = json.dumps(figures, indent=2) + "\n"
    if path is not None:
        write_text(path, text)
    print(text, end="", flush=True)


def progress(line: str) -> None:
    """Print a progress line to stderr."""
    print(line, file=sys.stderr, flush=True)
