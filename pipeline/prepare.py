"""Entry of the data half: `python pipeline/prepare.py configs/x.yaml key=value`. From a corpus to shards, on Ray Data.

Can be killed at any moment: the same command continues, and the shards are the same to the byte.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from common.config import ConfigError, expand, load_config, print_config
from common.logs import get_logger, setup_logging
from common.storage import write_aside, write_text
from pipeline.choosing.config import problems as choosing_problems
from pipeline.choosing.evaluation_sets import INDEX, build_index
from pipeline.config import PipelineConfig, config_hash, identity
from pipeline.duplicates.config import problems as duplicates_problems
from pipeline.estimate import Estimate, estimate, load_estimate
from pipeline.manifest import MANIFEST, TOKENIZER, Manifest, ShardError, build_manifest, load_manifest, sum_counts
from pipeline.outcome import nothing_kept, summary, too_many_failed
from pipeline.output import Plan, claim, discard, output_problems, plan_of
from pipeline.places import look
from pipeline.sample import output_tokenizer
from pipeline.shards import check_shards
from pipeline.stages import run_stages
from pipeline.tokenization import PretrainedTokenizer, TokenizerInfo, load_tokenizer
from pipeline.units import Unit, plan_units
from pipeline.worker import CANDIDATES


def problems(config: PipelineConfig) -> list[str]:
    """Everything that can be seen to be wrong before any work: inputs, tokenizer, output folder. One line a problem."""
    return _examine(config)[2]


def prepare(config: PipelineConfig) -> Manifest:
    """Prepares a corpus, or the rest of it when an earlier run was stopped.

    Returns:
        The manifest, which is also written to the output folder when every unit is finished.

    Raises:
        ConfigError: problems of inputs, tokenizer or output folder, or a corpus of which no document is kept.
        ShardError: too large a share of the documents could not be read, or totals that do not close.
    """
    units, plan, found = _examine(config)
    if found or plan is None:
        raise ConfigError("prepare", found)
    folder = expand(config.output).absolute()
    if (folder / MANIFEST).exists() and not check_shards(folder):
        get_logger().info("%s is prepared already", folder)
        return load_manifest(folder)
    tokenizer = set_up(config, folder, units, plan)
    sidecars = run_stages(config, folder, units, tokenizer)
    counts = sum_counts([sidecar.counts for sidecar in sidecars])
    if nothing := nothing_kept(counts, config):
        discard(folder)
        raise ConfigError("prepare", [nothing])
    if problem := too_many_failed(counts, sidecars, config):
        raise ShardError(problem)
    manifest = build_manifest(sidecars, tokenizer, config.geometry, identity(config), config_hash(config))
    write_text(folder / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
    shutil.rmtree(folder / CANDIDATES, ignore_errors=True)
    return manifest


def set_up(config: PipelineConfig, folder: Path, units: Sequence[Unit], plan: Plan) -> TokenizerInfo:
    """Claims the output folder and puts into it what every task needs: the tokenizer, the index of evaluation sets."""
    folder.mkdir(parents=True, exist_ok=True)
    claim(folder, plan)
    if config.choosing.contamination and not (folder / INDEX).exists():
        with write_aside(folder / INDEX) as aside:
            build_index(config.choosing.contamination, aside)
    return output_tokenizer(config, folder, units)


def plan_ahead(config: PipelineConfig) -> Estimate:
    """Estimates what `prepare` would make, from a sample; written to the output folder for the final report to score.

    Raises:
        ConfigError: problems of inputs, tokenizer or output folder.
    """
    units, plan, found = _examine(config)
    if found or plan is None:
        raise ConfigError("prepare", found)
    folder = expand(config.output).absolute()
    return estimate(config, folder, units, set_up(config, folder, units, plan))


def _examine(config: PipelineConfig) -> tuple[list[Unit], Plan | None, list[str]]:
    """Units, their plan when the inputs can be read, and every problem found on the way."""
    places = look(config.model_dump())
    unread = any(problem.startswith("corpus.") for problem in places)
    units, found = ([], []) if unread else plan_units(config.corpus, config.unit_mib)
    found += places
    found += choosing_problems(config.choosing) + duplicates_problems(config.duplicates)
    plan = None
    if not found:  # missing inputs would show up as changed inputs once more
        plan = plan_of(config, units)
        found += output_problems(expand(config.output), config, plan)
    is_name = isinstance(config.tokenizer, PretrainedTokenizer) and not any("tokenizer.name" in one for one in places)
    if is_name and (plan is None or not (expand(config.output) / TOKENIZER).exists()):
        assert isinstance(config.tokenizer, PretrainedTokenizer)
        try:
            load_tokenizer(config.tokenizer.name, config.tokenizer.trust_remote_code)
        except ConfigError as error:
            found += error.problems
    return units, plan, found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `prepare CONFIG [key=value ...] [--print-config]`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="prepare", description="From a corpus to Arrow shards.")
    parser.add_argument("config", help="YAML file with a `prepare` section")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of that section to change")
    parser.add_argument("--plan", action="store_true", help="estimate documents, tokens, disk and time, then stop")
    parser.add_argument("--print-config", action="store_true", help="show the resolved settings and stop")
    arguments = parser.parse_intermixed_args(argv)
    setup_logging("prepare")
    try:
        config = load_config(arguments.config, "prepare", PipelineConfig, arguments.overrides, look)
        if arguments.print_config:
            sys.stdout.write(print_config(config))
            return 0
        if arguments.plan:
            sys.stdout.write("\n".join(plan_ahead(config).lines()) + "\n")
            return 0
        manifest = prepare(config)
    except (ConfigError, ShardError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(summary(manifest, config.output) + "\n")
    if estimate := load_estimate(expand(config.output)):
        sys.stdout.write(estimate.score(manifest) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
