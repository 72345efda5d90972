"""What a preparation will make and how long it will take, estimated from a sample; and how good the estimate was."""

import os
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from common.config import Strict
from common.logs import get_logger
from common.storage import write_text
from pipeline.config import PipelineConfig
from pipeline.corpus import Part
from pipeline.manifest import SPLITS, Manifest
from pipeline.sample import output_engine
from pipeline.schema import UINT16_VOCABULARY
from pipeline.tokenization import TokenizerInfo
from pipeline.units import MIB, Unit, read_unit
from pipeline.worker import judged_documents

ESTIMATE = "estimate.json"
_SAMPLED_PARTS = 64
_SAMPLE_SECONDS = 20.0
_ROW_BYTES = 64
"""Of a shard: id, lengths, offset and a short source; beside tokens and windows."""


class Estimate(Strict):
    """Totals as the sample lets expect them. Duplicates and failures of whole files are not foreseen."""

    sampled_bytes: int
    """Input bytes that were read."""
    input_bytes: int
    documents: int
    kept: int
    num_tokens: int
    text_bytes: int
    shards: int
    """At most: units times splits."""
    shard_bytes: int
    cpu_seconds: float
    """Of one CPU."""
    num_cpus: int
    """CPUs that the time is for: this machine's, unless session.num_cpus says otherwise."""
    plan_hash: str = ""
    """Hash of the plan it is for (pipeline/output.py)."""

    def lines(self) -> list[str]:
        """The estimate for people."""
        minutes = self.cpu_seconds / self.num_cpus / 60
        return [
            f"estimated from {self.sampled_bytes / MIB:,.1f} of {self.input_bytes / MIB:,.1f} MiB of input:",
            f"  documents   {self.documents:,}, of which {self.kept:,} kept ({self.kept / max(1, self.documents):.0%})",
            f"  text        {self.text_bytes / MIB:,.1f} MiB",
            f"  tokens      {self.num_tokens:,} kept",
            f"  shards      up to {self.shards:,} files, {self.shard_bytes / MIB:,.1f} MiB",
            f"  time        {minutes:,.1f} minutes on {self.num_cpus} CPUs (and a few seconds for Ray to start)",
        ]

    def score(self, manifest: Manifest) -> str:
        """One line: how far each estimate was from what came out."""
        actual = {
            "documents": manifest.totals["read"],
            "kept": manifest.totals["kept"],
            "num_tokens": manifest.totals["num_tokens"],
            "shard_bytes": sum(shard.num_bytes for shard in manifest.shards),
        }
        told = []
        for name, value in actual.items():
            expected = getattr(self, name)
            told.append(f"{name.replace('_', ' ')} {expected:,} ({expected / max(1, value) - 1:+.0%})")
        return "estimated before: " + ", ".join(told)


def estimate(config: PipelineConfig, folder: Path, units: Sequence[Unit], tokenizer: TokenizerInfo) -> Estimate:
    """Reads parts of the corpus as a task would, for about 20 seconds, and scales up what was found a byte of input.

    Every part counts by its size, however much of it was read: a large file of which only the beginning was looked at
    stands for itself, not for its neighbours. Of more than 64 parts, 64 are drawn, each byte with the same chance.

    Args:
        config: settings.
        folder: holds the tokenizer.
        units: the plan.
        tokenizer: facts of the tokenizer.

    Raises:
        ConfigError: tokenizer.engine asks for one that does not give the same ids.
    """
    engine = output_engine(config, folder, units)
    list(judged_documents(iter(()), folder, config, tokenizer, engine))  # loading is no part of the rate
    total = sum(unit.num_bytes for unit in units)
    found, sampled_bytes = _Found(), 0
    for part, share in _sampled_parts(units):
        began = time.perf_counter()
        reading = read_unit(Unit(name="00000", parts=[part]), config.corpus)
        read = _Found()
        started = time.process_time()
        for judged, tokens in judged_documents(reading, folder, config, tokenizer, engine):
            size = 0 if tokens is None else len(tokens)
            read += _Found(1, int(tokens is not None), size, judged.entry.text_bytes)
            if time.perf_counter() - began > _SAMPLE_SECONDS * share:
                break
        read += _Found(cpu_seconds=time.process_time() - started)
        found += read * (share * total / max(1, reading.bytes_read))
        sampled_bytes += reading.bytes_read
    token_bytes = 2 if tokenizer.vocab_size <= UINT16_VOCABULARY else 4
    window_bytes = 4 / config.geometry.max_tokens
    return Estimate(
        sampled_bytes=sampled_bytes,
        input_bytes=total,
        documents=round(found.documents),
        kept=round(found.kept),
        num_tokens=round(found.num_tokens),
        text_bytes=round(found.text_bytes),
        shards=len(units) * len(SPLITS),
        shard_bytes=round(found.num_tokens * (token_bytes + window_bytes) + found.kept * _ROW_BYTES),
        cpu_seconds=found.cpu_seconds,
        num_cpus=config.session.num_cpus or os.cpu_count() or 1,
    )


@dataclass(frozen=True)
class _Found:
    """What was read, or what that stands for."""

    documents: float = 0
    kept: float = 0
    num_tokens: float = 0
    text_bytes: float = 0
    cpu_seconds: float = 0

    def __add__(self, other: "_Found") -> "_Found":
        return _Found(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: float) -> "_Found":
        return _Found(*(value * factor for value in astuple(self)))


def _sampled_parts(units: Sequence[Unit]) -> list[tuple[Part, float]]:
    """Parts of the corpus, and the share of its bytes that each stands for."""
    parts = [part for unit in units for part in unit.parts if part.num_bytes]
    ends = np.cumsum([part.num_bytes for part in parts])
    if len(parts) <= _SAMPLED_PARTS:
        return [(part, part.num_bytes / int(ends[-1])) for part in parts]
    places = (np.arange(_SAMPLED_PARTS) + 0.5) * (int(ends[-1]) / _SAMPLED_PARTS)
    drawn, times = np.unique(np.searchsorted(ends, places, side="right"), return_counts=True)
    return [(parts[index], count / _SAMPLED_PARTS) for index, count in zip(drawn, times.tolist(), strict=True)]


def keep_estimate(made: Estimate, folder: Path) -> None:
    """Writes an estimate beside the output folder, from where `prepare` takes it."""
    try:
        write_text(_beside(folder), made.model_dump_json(indent=1) + "\n")
    except OSError as error:
        get_logger().warning("the estimate cannot be kept for the final report: %s", error)


def adopt_estimate(folder: Path, plan_hash: str) -> None:
    """Moves the estimate of the same plan, if one lies beside the output folder, into it."""
    path = _beside(folder)
    found = _load(path)
    if found is not None and found.plan_hash == plan_hash:
        write_text(folder / ESTIMATE, path.read_text(encoding="utf-8"))
        path.unlink(missing_ok=True)


def _beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.{ESTIMATE}")


def load_estimate(folder: Path) -> Estimate | None:
    """The estimate that `--plan` left in an output folder; None where it did not run."""
    return _load(folder / ESTIMATE)


def _load(path: Path) -> Estimate | None:
    try:
        return Estimate.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
