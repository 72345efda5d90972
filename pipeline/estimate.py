"""What a preparation will make and how long it will take, estimated from a sample; and how good the estimate was."""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import Field, ValidationError

from common.config import Strict
from common.logs import get_logger
from common.storage import write_text
from pipeline.config import PipelineConfig
from pipeline.corpus import Record
from pipeline.encoder import EngineName
from pipeline.manifest import SPLITS, Manifest
from pipeline.sample import output_engine
from pipeline.schema import UINT16_VOCABULARY
from pipeline.strata import Found, Stratum, bites, draw_strata
from pipeline.tokenization import TokenizerInfo
from pipeline.units import MIB, Unit, read_unit
from pipeline.worker import judged_documents

ESTIMATE = "estimate.json"
_SAMPLE_SECONDS = 20.0
_RANGED = ("documents", "kept", "num_tokens", "text_bytes")
"""Estimates whose deviation is told."""
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

    seconds: float | None = None
    """Of the work on so many CPUs, without Ray's start; None in an estimate of an earlier version."""
    deviations: dict[str, float] = Field(default_factory=dict)
    """Standard deviations of the estimates, by name."""

    def lines(self) -> list[str]:
        """The estimate for people."""
        minutes = self._seconds / 60
        kept = f"of which {self.kept:,} kept{self._range('kept')} ({self.kept / max(1, self.documents):.0%})"
        return [
            f"estimated from {self.sampled_bytes / MIB:,.1f} of {self.input_bytes / MIB:,.1f} MiB of input:",
            f"  documents   {self.documents:,}{self._range('documents')}, {kept}",
            f"  text        {self.text_bytes / MIB:,.1f} MiB",
            f"  tokens      {self.num_tokens:,} kept{self._range('num_tokens')}",
            f"  shards      up to {self.shards:,} files, {self.shard_bytes / MIB:,.1f} MiB",
            f"  time        {minutes:,.1f} minutes on {self.num_cpus} CPUs (and a few seconds for Ray to start)",
        ]

    def bounds(self, name: str) -> tuple[int, int] | None:
        """The range of the true figure, nearly always: two deviations to each side; None where all of it was read."""
        if not (deviation := self.deviations.get(name)):
            return None
        value = getattr(self, name)
        return max(0, round(value - 2 * deviation)), round(value + 2 * deviation)

    def against(self, manifest: Manifest, seconds: float | None) -> list[tuple[str, int, int]]:
        """Name, estimate and outcome of everything that can be compared.

        Args:
            manifest: what was made.
            seconds: that it took, where that is known.
        """
        totals = manifest.totals
        found = [
            ("documents", self.documents, totals["read"]),
            ("kept", self.kept, totals["kept"]),
            ("num tokens", self.num_tokens, totals["num_tokens"]),
            ("text bytes", self.text_bytes, totals["text_bytes"]),
            ("shard bytes", self.shard_bytes, sum(shard.num_bytes for shard in manifest.shards)),
        ]
        return found + ([] if seconds is None else [("seconds", round(self._seconds), round(seconds))])

    def score(self, manifest: Manifest, seconds: float | None = None) -> str:
        """One line: how far each estimate was from what came out."""
        told = [
            f"{name} {expected:,} ({expected / max(1, came) - 1:+.0%})"
            for name, expected, came in self.against(manifest, seconds)
        ]
        return "estimated before: " + ", ".join(told)

    @property
    def _seconds(self) -> float:
        return self.cpu_seconds / self.num_cpus if self.seconds is None else self.seconds

    def _range(self, name: str) -> str:
        bounds = self.bounds(name)
        return f" ({bounds[0]:,} to {bounds[1]:,})" if bounds else ""


def estimate(config: PipelineConfig, folder: Path, units: Sequence[Unit], tokenizer: TokenizerInfo) -> Estimate:
    """Reads parts of the corpus as a task would, for about 20 seconds, and scales up what was found a byte of input.

    Each folder and each format is estimated by itself (pipeline/strata.py), from a few parts at least: where small
    files hold most of the documents, large ones say nothing about them.

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
    strata = draw_strata([part for unit in units for part in unit.parts])
    total = sum(stratum.num_bytes for stratum in strata)
    for stratum in strata:
        for one in stratum.sampled:
            began, started = time.perf_counter(), time.process_time()
            reading = read_unit(Unit(name="00000", parts=[one.part]), config.corpus)
            for records, num_bytes in bites(reading, one.part.num_bytes):
                found = _judge(records, folder, config, tokenizer, engine)
                now = time.process_time()
                one.bites.append((replace(found, cpu_seconds=now - started), num_bytes))
                started = now
                if time.perf_counter() - began > _SAMPLE_SECONDS * one.stands_for / total:
                    break
    found = sum((stratum.estimate() for stratum in strata), Found())
    spread = sum((stratum.variance() for stratum in strata), Found())
    num_cpus = config.session.num_cpus or os.cpu_count() or 1
    token_bytes = 2 if tokenizer.vocab_size <= UINT16_VOCABULARY else 4
    window_bytes = 4 / config.geometry.max_tokens
    return Estimate(
        sampled_bytes=sum(one.num_bytes for stratum in strata for one in stratum.sampled),
        input_bytes=total,
        documents=round(found.documents),
        kept=round(found.kept),
        num_tokens=round(found.num_tokens),
        text_bytes=round(found.text_bytes),
        shards=len(units) * len(SPLITS),
        shard_bytes=round(found.num_tokens * (token_bytes + window_bytes) + found.kept * _ROW_BYTES),
        cpu_seconds=found.cpu_seconds,
        num_cpus=num_cpus,
        seconds=max(found.cpu_seconds / num_cpus, _longest_unit(units, strata)),
        deviations={name: round(math.sqrt(getattr(spread, name)), 3) for name in _RANGED},
    )


def _longest_unit(units: Sequence[Unit], strata: Sequence[Stratum]) -> float:
    """Seconds of the unit that takes longest: no number of CPUs makes the work shorter."""
    rates: dict[tuple[str, int], float] = {}
    for stratum in strata:
        rate = stratum.estimate().cpu_seconds / stratum.num_bytes
        rates |= {(part.source, part.start): rate for part in stratum.parts}
    costs = (sum(rates.get((part.source, part.start), 0) * part.num_bytes for part in unit.parts) for unit in units)
    return max(costs, default=0)


def _judge(
    records: Sequence[Record], folder: Path, config: PipelineConfig, tokenizer: TokenizerInfo, engine: EngineName
) -> Found:
    """The sums over some records."""
    found = Found()
    for judged, tokens in judged_documents(iter(records), folder, config, tokenizer, engine):
        found += Found(1, int(tokens is not None), 0 if tokens is None else len(tokens), judged.entry.text_bytes)
    return found


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
