"""Options, clocks and figures of benchmarks; a published number carries hardware, versions, commit and command."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from declutr.common.storage import write_text
from declutr.reproduction import provenance

MIB = 2**20


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options of every benchmark."""
    layout = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=description, formatter_class=layout
    )
    options.add_argument("--json", type=Path, metavar="OUT", help="file for the figures, which are also printed")
    options.add_argument("--commit", help="commit of the code, if run outside a git checkout")
    options.add_argument("--seed", type=int, default=0, help="seed of weights, documents, spans and masks")
    return options


def add_device(options: argparse.ArgumentParser) -> None:
    """Add the options of benchmarks that run an encoder on a device of choice."""
    options.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--precision", choices=("fp32", "bf16"), help="default: `auto`, as of the trainer")


def parse(options: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments; `facts` of the result are hardware, versions, commit and command."""
    settings = options.parse_args(arguments)
    # Taken now, because the benchmark itself will load the machine.
    settings.facts = provenance.facts([options.prog, *sys.argv[1:]], settings.commit)
    return settings


def ratios(reference_seconds: Sequence[float], own_seconds: Sequence[float]) -> dict[str, Any]:
    """Quotients of the seconds of two sides that took turns, their median and their range."""
    quotients = [other / own for other, own in zip(reference_seconds, own_seconds, strict=True)]
    return {
        "ratios": [round(ratio, 4) for ratio in quotients],
        "ratio_median": round(statistics.median(quotients), 4),
        "ratio_range": [round(min(quotients), 4), round(max(quotients), 4)],
    }


def finish(device: torch.device) -> float:
    """Wait for the device; return wall seconds, for differences."""
    if device.type == "cuda":
        torch.cuda.synchronize()  # a GPU works behind the program
    return time.perf_counter()


def publish(figures: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the figures with the facts of this process, and write them to the file of `--json`."""
    text = json.dumps({**figures, **options.facts}, indent=2) + "\n"
    if options.json is not None:
        write_text(options.json, text)
    print(text, end="", flush=True)


def progress(line: str) -> None:
    """Print a progress line to stderr."""
    print(line, file=sys.stderr, flush=True)  # stdout has the figures alone
