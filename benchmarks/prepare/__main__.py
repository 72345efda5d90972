"""Throughput of preparation, from compressed JSONL to shards, against `datasets` and against the tokenizer alone.

    python -m benchmarks.prepare --json OUT [--corpus 'FOLDER/*.jsonl.gz'] [--tokenizer FOLDER] [--rounds 5]

Without a corpus, the documentation of the installed packages is written to compressed JSONL, and a byte-level BPE is
trained on it. All programs take turns in every round. MiB count normalised text in UTF-8.
"""

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks import record
from benchmarks.prepare import others
from declutr.common.console.logs import setup_logging
from declutr.common.session import start_ray
from declutr.common.watcher import Watcher
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.job.units import plan_units, read_unit
from declutr.pipeline.prepare import prepare
from declutr.pipeline.readers.corpus import Document
from declutr.pipeline.readers.pydocs import PythonDocs
from declutr.pipeline.shards.manifest import Manifest
from declutr.pipeline.tokenizer.batch_tokenizer import BatchTokenizer
from declutr.pipeline.tokenizer.engine import choose_engine
from declutr.pipeline.tokenizer.tokenization import fingerprint, load_tokenizer, train_tokenizer

MIB = 2**20
_ROOT = Path(__file__).resolve().parents[2]
_SHARED = _ROOT.parent / "shared" / "data"
_TAKEN = ("warm", "cold", "datasets", "our_engine", "tiktoken", "tokenizers")
_DEMO_FILES = 8
_DEMO_VOCABULARY = 16_384


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    options = record.parser("prepare", __doc__)
    options.add_argument("--corpus", metavar="GLOB", help="compressed JSONL with the key text")
    options.add_argument("--tokenizer", metavar="FOLDER", help="a saved tokenizer")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--workers", type=int, default=2, help="processes per side")
    options.add_argument(
        "--max-tokens", type=int, default=512, help="longest span; documents hold at least 4 times that"
    )
    given = options.parse_args(arguments)
    setup_logging("benchmark")
    with tempfile.TemporaryDirectory(prefix="declutr-benchmark-") as folder:
        record.publish(measure(given, Path(folder)), given.json)


def measure(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure all figures."""
    paths, tokenizer, corpus = inputs(given, work)
    start_ray(given.workers)
    settings = {"paths": paths, "tokenizer": tokenizer, "workers": given.workers, "min_tokens": 4 * given.max_tokens}
    choice = choose_engine(Path(tokenizer), "auto")
    settings |= {"stock": False, "engine": choice.engine, "prefix": BatchTokenizer.load(Path(tokenizer)).prefix}
    manifest = ours(given, settings, work / "warm-up")[1]  # Ray's workers start and import once
    mib = manifest.totals["text_bytes"] / MIB
    rates: dict[str, list[float]] = {name: [] for name in _TAKEN}
    peaks = []
    for number in range(given.rounds):
        where = work / f"round-{number}"
        with WorkerMemory() as memory:
            rates["warm"].append(mib / ours(given, settings, where / "warm")[0])
        peaks.append(memory.peak_mib)
        rates["cold"].append(mib / command(given, settings, where / "cold"))
        rates["our_engine"].append(mib / engine_alone(settings, where / "limit"))
        if choice.engine == "tiktoken":
            rates["tiktoken"].append(mib / engine_alone(settings | {"stock": True}, where / "limit"))
        if choice.engine != "tokenizers":
            rates["tokenizers"].append(mib / engine_alone(settings | {"engine": "tokenizers"}, where / "limit"))
        if find_spec("datasets"):
            found = others.run(others.datasets, [settings], where / "datasets")[0]
            if (found["documents"], found["tokens"]) != (manifest.totals["kept"], manifest.totals["num_tokens"]):
                raise RuntimeError(f"`datasets` kept other documents or tokens: {found}, ours: {manifest.totals}")
            rates["datasets"].append(mib / found["seconds"])
        record.progress(f"round {number}: " + ", ".join(f"{k} {v[-1]:.1f} MiB/s" for k, v in rates.items() if v))
    return {
        "benchmark": "prepare",
        "corpus": corpus,
        "text_mib": round(mib, 1),
        "documents": {key: manifest.totals[key] for key in ("read", "kept", "num_tokens")},
        "workers": given.workers,
        "engine": choice.engine,
        "engine_reason": choice.reason,
        "mib_per_s": _median(rates["warm"]),
        "ratio_vs_datasets": _ratio(rates["warm"], rates["datasets"])["median"],
        "share_of_limit": _ratio(rates["warm"], rates["tiktoken"] or rates["our_engine"])["median"],
        "peak_rss_mib": max((peak for peak in peaks if peak is not None), default=None),
        "ratio_vs_datasets_rounds": _ratio(rates["warm"], rates["datasets"]),
        "share_of_limit_rounds": _ratio(rates["warm"], rates["tiktoken"] or rates["our_engine"]),
        "engine_ratio_vs_tokenizers_rounds": _ratio(rates["our_engine"], rates["tokenizers"]),
        "share_of_our_engine_rounds": _ratio(rates["warm"], rates["our_engine"]),
        "with_ray_start": {
            "mib_per_s": _median(rates["cold"]),
            "ratio_vs_datasets": _ratio(rates["cold"], rates["datasets"]),
            "share_of_limit": _ratio(rates["cold"], rates["tiktoken"] or rates["our_engine"]),
            "start_seconds": _median([mib / c - mib / w for c, w in zip(rates["cold"], rates["warm"], strict=True)]),
        },
        "rates_mib_per_s": {name: [round(rate, 2) for rate in found] for name, found in rates.items()},
        **record.facts("prepare", given.commit),
    }


def inputs(given: argparse.Namespace, work: Path) -> tuple[list[str], str, str]:
    """Files of the corpus, folder of the tokenizer, and a description of the corpus.

    Raises:
        SystemExit: `--corpus` matches no file.
    """
    pattern = given.corpus or str(_SHARED / "corpus" / "*.jsonl.gz")
    paths = others.expand_paths(pattern)
    if given.corpus and not paths:
        raise SystemExit(f"--corpus {given.corpus!r} matches no file")
    kind = "files given" if given.corpus else "shared corpora"
    if not paths:
        kind, paths = "documentation of the installed packages", _demo_corpus(work / "corpus")
    real = _SHARED / "tokenizers" / "roberta-base"
    if given.tokenizer or real.is_dir():
        tokenizer = load_tokenizer(given.tokenizer or str(real))
    else:
        tokenizer = train_tokenizer(others.texts_of(paths), _DEMO_VOCABULARY)
    folder = work / f"tokenizer-{fingerprint(tokenizer)[:8]}"
    tokenizer.save_pretrained(str(folder))
    return paths, str(folder), kind


def _demo_corpus(folder: Path) -> list[str]:
    """Write the documentation of the installed packages as compressed JSONL."""
    folder.mkdir()
    corpus = PythonDocs(kind="python_docs")
    units, _ = plan_units(corpus, 4.0)
    paths = [str(folder / f"{number}.jsonl.gz") for number in range(_DEMO_FILES)]
    for number, path in enumerate(paths):
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as stream:
            for unit in units[number::_DEMO_FILES]:
                texts = (record_.text for record_ in read_unit(unit, corpus) if isinstance(record_, Document))
                stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return paths


def _config(given: argparse.Namespace, settings: dict[str, Any], output: Path) -> dict[str, Any]:
    """The `prepare` section for this project."""
    return {
        "output": str(output),
        "corpus": {"kind": "files", "paths": settings["paths"]},
        "tokenizer": {"kind": "pretrained", "name": settings["tokenizer"]},
        "geometry": {"num_anchors": 2, "max_tokens": given.max_tokens},
        "session": {"num_cpus": given.workers},
    }


def ours(given: argparse.Namespace, settings: dict[str, Any], output: Path) -> tuple[float, Manifest]:
    """Time `prepare` in a running session; return seconds and manifest."""
    begun = time.perf_counter()
    manifest = prepare(PipelineConfig.model_validate(_config(given, settings, output)))
    return time.perf_counter() - begun, manifest


def command(given: argparse.Namespace, settings: dict[str, Any], output: Path) -> float:
    """Time the command, including the start of Python and Ray."""
    output.parent.mkdir(parents=True, exist_ok=True)
    config = output.parent / "config.yaml"
    config.write_text(yaml.safe_dump({"prepare": _config(given, settings, output)}), encoding="utf-8")
    begun = time.perf_counter()
    line = [sys.executable, "-m", "declutr.pipeline.prepare", str(config)]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def engine_alone(settings: dict[str, Any], cache: Path) -> float:
    """Time the engine alone, in as many processes, on texts in memory."""
    shares = [settings | {"share": share} for share in range(settings["workers"])]
    return max(float(found["seconds"]) for found in others.run(others.limit, shares, cache))


class WorkerMemory(Watcher):
    """Peak resident memory of Ray's workers below this process, MiB; None without /proc."""

    def __init__(self) -> None:
        super().__init__(0.2, "worker-memory")
        self.peak_mib: float | None = None

    def look(self) -> None:
        """Reads the peaks of the processes of now."""
        for process in psutil.Process().children(recursive=True):
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError:  # ended meanwhile, or no /proc
                continue
            status = dict(line.partition(":")[::2] for line in lines)
            if status.get("Name", "").strip().startswith("ray::") and "VmHWM" in status:
                self.peak_mib = max(self.peak_mib or 0.0, round(int(status["VmHWM"].split()[0]) / 1024, 1))


def _median(rates: list[float]) -> float:
    return round(statistics.median(rates), 2)


def _ratio(mine: list[float], theirs: list[float]) -> dict[str, Any]:
    """Median and range of the quotients within each round."""
    found = [a / b for a, b in zip(mine, theirs, strict=False)]
    if not found:
        return {"median": None, "range": None}
    return {"median": round(statistics.median(found), 3), "range": [round(min(found), 3), round(max(found), 3)]}


if __name__ == "__main__":
    main()
