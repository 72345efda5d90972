"""What a preparation will make and how long it will take, estimated from a sample; and how good the estimate was."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from common.config import Strict
from common.storage import write_text
from pipeline.config import PipelineConfig
from pipeline.manifest import SPLITS, Manifest
from pipeline.sample import output_engine, sample_units
from pipeline.schema import UINT16_VOCABULARY
from pipeline.tokenization import TokenizerInfo
from pipeline.units import MIB, Unit, read_unit
from pipeline.worker import judged_documents

ESTIMATE = "estimate.json"
_SAMPLED_UNITS = 16
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
    """Reads the beginning of some units as a task would, for at most 20 seconds, and scales up by input bytes.

    Args:
        config: settings.
        folder: output folder with the tokenizer; the estimate is written there.
        units: the plan.
        tokenizer: facts of the tokenizer.
    """
    sampled = sample_units(units, config.seed, _SAMPLED_UNITS)
    bytes_read = documents = kept = num_tokens = text_bytes = 0
    engine = output_engine(config, folder, units)
    list(judged_documents(iter(()), folder, config, tokenizer, engine))  # loading is no part of the rate
    started = time.perf_counter()
    for index, unit in enumerate(sampled):
        deadline = started + _SAMPLE_SECONDS * (index + 1) / len(sampled)
        reading = read_unit(unit, config.corpus)
        for judged, tokens in judged_documents(reading, folder, config, tokenizer, engine):
            documents += 1
            text_bytes += judged.entry.text_bytes
            if tokens is not None:
                kept += 1
                num_tokens += len(tokens)
            if time.perf_counter() > deadline:
                break
        bytes_read += reading.bytes_read
    seconds = time.perf_counter() - started
    total = sum(unit.num_bytes for unit in units)
    scale = total / max(1, bytes_read)
    token_bytes = 2 if tokenizer.vocab_size <= UINT16_VOCABULARY else 4
    window_bytes = 4 / config.geometry.max_tokens
    made = Estimate(
        sampled_bytes=bytes_read,
        input_bytes=total,
        documents=round(documents * scale),
        kept=round(kept * scale),
        num_tokens=round(num_tokens * scale),
        text_bytes=round(text_bytes * scale),
        shards=len(units) * len(SPLITS),
        shard_bytes=round(scale * (num_tokens * (token_bytes + window_bytes) + kept * _ROW_BYTES)),
        cpu_seconds=seconds * scale,
        num_cpus=config.session.num_cpus or os.cpu_count() or 1,
    )
    write_text(folder / ESTIMATE, made.model_dump_json(indent=1) + "\n")
    return made


def load_estimate(folder: Path) -> Estimate | None:
    """The estimate that `--plan` left in an output folder; None where it did not run."""
    try:
        return Estimate.model_validate_json((folder / ESTIMATE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
