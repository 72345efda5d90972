"""Entry of the data half: `python pipeline/prepare.py configs/x.yaml key=value`. From a corpus to shards, on Ray Data.

Can be killed at any moment: the same command continues, and the shards are the same to the byte.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from common.config import ConfigError, expand, load_config, print_config
from common.logs import get_logger, setup_logging
from common.storage import folder_aside, write_text
from pipeline.config import PipelineConfig, config_hash, identity
from pipeline.corpus import Document, normalise
from pipeline.engine import choose_engine
from pipeline.manifest import (
    MANIFEST,
    TOKENIZER,
    Counts,
    Manifest,
    ShardError,
    Sidecar,
    build_manifest,
    load_manifest,
    sum_counts,
)
from pipeline.output import Plan, claim, discard, output_problems, plan_of
from pipeline.progress import Progress
from pipeline.session import start_ray
from pipeline.tokenization import (
    PretrainedTokenizer,
    TokenizerInfo,
    TrainedTokenizer,
    describe_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from pipeline.units import MIB, Unit, largest_first, plan_units, read_unit
from pipeline.worker import finished_sidecar, prepare_unit

_SAMPLED_UNITS = 256
_COMPARED_MIB = 1.0
"""Text of the corpus on which tokenizing engines are compared."""


def problems(config: PipelineConfig) -> list[str]:
    """Everything that can be seen to be wrong before any work: inputs, tokenizer, output folder. One line a problem."""
    return _examine(config)[2]


def prepare(config: PipelineConfig) -> Manifest:
    """Prepares a corpus, or the rest of it when an earlier run was stopped.

    Returns:
        The manifest, which is also written to the output folder when every unit is finished.

    Raises:
        ConfigError: problems of inputs, tokenizer or output folder, or a corpus of which no document is kept.
        ShardError: totals that do not close.
    """
    units, plan, found = _examine(config)
    if found:
        raise ConfigError("prepare", found)
    folder = expand(config.output).absolute()
    if (folder / MANIFEST).exists() and _is_finished(folder):
        get_logger().info("%s is prepared already", folder)
        return load_manifest(folder)
    folder.mkdir(parents=True, exist_ok=True)
    claim(folder, plan)
    tokenizer = _tokenizer(config, folder, units)
    sidecars = _run(config, folder, units, tokenizer)
    ordered = [sidecars[unit.name] for unit in units]
    if nothing := _nothing_kept(sum_counts([sidecar.counts for sidecar in ordered]), config):
        discard(folder)
        raise ConfigError("prepare", [nothing])
    manifest = build_manifest(ordered, tokenizer, config.geometry, identity(config), config_hash(config))
    write_text(folder / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
    return manifest


def _examine(config: PipelineConfig) -> tuple[list[Unit], Plan, list[str]]:
    """Units, their plan, and every problem found on the way."""
    units, found = plan_units(config.corpus, config.unit_mib)
    folder = expand(config.output)
    plan = plan_of(config, units)
    if not found:  # missing inputs would show up as changed inputs once more
        found += output_problems(folder, config, plan)
    if isinstance(config.tokenizer, PretrainedTokenizer) and not (folder / TOKENIZER).exists():
        try:
            load_tokenizer(config.tokenizer.name, config.tokenizer.trust_remote_code)
        except ConfigError as error:
            found += error.problems
    return units, plan, found


def _is_finished(folder: Path) -> bool:
    """Whether every shard of a manifest is there in full size."""
    shards = load_manifest(folder).shards
    return all((folder / s.name).is_file() and (folder / s.name).stat().st_size == s.num_bytes for s in shards)


def _tokenizer(config: PipelineConfig, folder: Path, units: Sequence[Unit]) -> TokenizerInfo:
    """The tokenizer in the output folder, put there first when this is the first run."""
    if not (folder / TOKENIZER).exists():
        made = _make_tokenizer(config, units)
        with folder_aside(folder / TOKENIZER) as aside:
            made.save_pretrained(str(aside))
    return describe_tokenizer(load_tokenizer(str(folder / TOKENIZER)), config.tokenizer.kind)


def _make_tokenizer(config: PipelineConfig, units: Sequence[Unit]) -> Any:
    """Loads or trains the tokenizer that the config asks for."""
    if isinstance(config.tokenizer, TrainedTokenizer):
        get_logger().info("training a tokenizer on %g MiB of the corpus", config.tokenizer.sample_mib)
        return train_tokenizer(sample_texts(config, units, config.tokenizer.sample_mib), config.tokenizer.vocab_size)
    return load_tokenizer(config.tokenizer.name, config.tokenizer.trust_remote_code)


def sample_texts(config: PipelineConfig, units: Sequence[Unit], sample_mib: float) -> Iterator[str]:
    """Normalised texts from the beginning of each unit (of 256 units chosen by hash, when there are more).

    What one unit has too little of is taken from the ones after it, so that the sample is full when the corpus is.
    """
    chosen = sorted(units, key=lambda unit: hashlib.blake2b(f"{config.seed}/{unit.name}".encode()).digest())
    chosen = sorted(chosen[:_SAMPLED_UNITS], key=lambda unit: (unit.num_bytes, unit.name))
    left = sample_mib * MIB
    for index, unit in enumerate(chosen):
        share = left / (len(chosen) - index)
        for record in read_unit(unit, config.corpus):
            if share <= 0:
                break
            if isinstance(record, Document):
                text = normalise(record.text)
                share -= len(text)
                left -= len(text)
                yield text


def _run(config: PipelineConfig, folder: Path, units: Sequence[Unit], tokenizer: TokenizerInfo) -> dict[str, Sidecar]:
    """Sidecars of all units by name: the finished ones as they are, the others through Ray Data."""
    found = [finished_sidecar(unit, folder, config) for unit in units]
    done = [sidecar for sidecar in found if sidecar]
    sidecars = {sidecar.unit: sidecar for sidecar in done}
    todo = largest_first([unit for unit, sidecar in zip(units, found, strict=True) if sidecar is None])
    if done:
        get_logger().info("%d of %d units are finished already", len(done), len(units))
    if not todo:
        return sidecars
    chosen = choose_engine(folder / TOKENIZER, config.tokenizer.engine, sample_texts(config, units, _COMPARED_MIB))
    get_logger().info("tokenizing with %s: %s", chosen.engine, chosen.reason)
    start_ray(config.session.num_cpus, config.session.address)
    # One block a unit: a task that dies is retried alone. The order in which they end does not matter.
    rows = ray.data.from_items([{"unit": unit.model_dump_json()} for unit in todo], override_num_blocks=len(todo))
    arguments = {"folder": str(folder), "config": config, "tokenizer": tokenizer, "engine": chosen.engine}
    results = rows.map(prepare_unit, fn_kwargs=arguments, num_cpus=1)
    with Progress(folder, sum(unit.num_bytes for unit in units), done) as progress:
        for row in results.iter_rows():
            sidecar = Sidecar.model_validate_json(row["sidecar"])
            sidecars[sidecar.unit] = sidecar
            progress.add(sidecar)
    return sidecars


def _nothing_kept(counts: Counts, config: PipelineConfig) -> str | None:
    """Why there is nothing to train on, in words; None when some document was kept."""
    if counts.kept:
        return None
    if counts.read == 0:
        return "corpus: empty, the inputs hold not one document; check corpus.paths"
    failed = ", ".join(f"{number} {reason}" for reason, number in counts.failed.items())
    could_not = f" ({failed})" if failed else ""
    if counts.read == sum(counts.failed.values()):
        return (
            f"corpus: no document could be read, all {counts.read} failed{could_not}; check paths, format and "
            "text_field of the corpus"
        )
    geometry = config.geometry
    return (
        f"corpus: none of {counts.read} documents is long enough{could_not}: the longest has {counts.longest_tokens} "
        f"tokens, the limit is 2 * geometry.num_anchors ({geometry.num_anchors}) * geometry.max_tokens "
        f"({geometry.max_tokens}) = {geometry.min_document_tokens}; lower one of them or use longer documents"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `prepare CONFIG [key=value ...] [--print-config]`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="prepare", description="From a corpus to Arrow shards.")
    parser.add_argument("config", help="YAML file with a `prepare` section")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of that section to change")
    parser.add_argument("--print-config", action="store_true", help="show the resolved settings and stop")
    arguments = parser.parse_args(argv)
    setup_logging("prepare")
    try:
        config = load_config(arguments.config, "prepare", PipelineConfig, arguments.overrides)
        if arguments.print_config:
            sys.stdout.write(print_config(config))
            return 0
        manifest = prepare(config)
    except (ConfigError, ShardError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(summary(manifest, config.output) + "\n")
    return 0


def summary(manifest: Manifest, output: str) -> str:
    """One line: what was read, what became of it, where it is."""
    totals = manifest.totals
    lost = ", ".join(f"{number:,} {reason}" for reason, number in [*manifest.dropped.items(), *manifest.failed.items()])
    return (
        f"{output}: {totals['read']:,} documents read, {totals['kept']:,} kept ({totals['kept_train']:,} train, "
        f"{totals['kept_held_out']:,} held out){f', {lost}' if lost else ''}; {totals['num_tokens']:,} tokens in "
        f"{len(manifest.shards)} shards"
    )


if __name__ == "__main__":
    sys.exit(main())
