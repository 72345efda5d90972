"""Entry point of `prepare`: `python pipeline/prepare.py configs/x.yaml key=value`, from a corpus to shards on Ray Data.

It can be killed at any moment: the same command continues, and the shards are the same to the byte.
"""

import _thread
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from declutr.common.relay import end_at_signals, relay

if __name__ == "__main__":
    relay()  # before the imports below start threads
    end_at_signals()

from declutr.common.cluster import cluster_problem, in_session, named_cluster
from declutr.common.config import Settings, load_config
from declutr.common.config_docs import annotated_yaml
from declutr.common.console.logs import get_logger, setup_logging
from declutr.common.console.terminal import answered, config_parser
from declutr.common.errors import ConfigError, ShardError, refused_settings
from declutr.common.storage import write_text
from declutr.common.stores.address import is_remote
from declutr.pipeline.config import PipelineConfig, look
from declutr.pipeline.filters.document_filter import fingerprints
from declutr.pipeline.filters.document_filter import problems as filter_problems
from declutr.pipeline.filters.evaluation_sets import INDEX
from declutr.pipeline.job.estimate import Estimate, estimate
from declutr.pipeline.job.outcome import (
    labels_hint,
    lines_hint,
    losses_hint,
    nothing_kept,
    summary,
    too_many_failed,
    unknown_hint,
)
from declutr.pipeline.job.output import Preparation, plan_of, write_shared_files
from declutr.pipeline.job.stages import run_stages
from declutr.pipeline.job.stored import open_output
from declutr.pipeline.job.units import Unit, fit_units, with_file_states
from declutr.pipeline.readers.skipped import Skipped, describe_skipped
from declutr.pipeline.shards.ledger import sum_counts, sum_losses
from declutr.pipeline.shards.manifest import MANIFEST, TOKENIZER, Manifest, build_manifest, examples_of, load_manifest
from declutr.pipeline.tokenizer.tokenization import PretrainedTokenizer, load_tokenizer, was_replaced


def problems(config: PipelineConfig) -> list[str]:
    """Finds problems of inputs, tokenizer and output before any work, one line each."""
    try:
        with _planned(config):
            return []
    except ConfigError as error:
        return error.problems


def prepare(
    settings: Settings[PipelineConfig], overrides: Sequence[str] = (), *, verify_inputs: bool = False
) -> Manifest:
    """Prepares a corpus, or the rest of it if an earlier run was stopped.

    Args:
        settings: the section `prepare` as nested dictionaries, the path of a YAML file that has it, or its model.
        overrides: settings to change, as `key.sub=value`.
        verify_inputs: compares every byte of the inputs with those of finished units, even if times and samples are
            the same.

    Returns:
        The manifest, which is also written to the output when all units are finished.

    Raises:
        ConfigError: problems of settings, inputs, tokenizer or output, or no document of the corpus is kept.
        ShardError: too many documents could not be read, the counts do not balance, or the output cannot be written to.
        RunLockedError: another command holds the output.
        SessionError: no Ray session could be started on this machine.
    """
    config = load_config(settings, "prepare", PipelineConfig, overrides, look)
    with _planned(config, verify_inputs) as job:
        output = job.output
        try:
            if output.is_complete():
                get_logger().info("%s is already prepared", output.name)
                return load_manifest(output.folder)
            with output.owned(_stop_after_takeover):
                output.refresh()  # another command may have changed it meanwhile
                if messages := output.problems(job.plan):
                    raise ConfigError("prepare", messages)
                return _complete(job)
        except OSError as error:  # a full disk, a lost storage, a folder without write permission
            raise ShardError(
                f"prepare: {error}. Finished work in {output.name} is kept; remove the cause, then the same command "
                "continues"
            ) from error


def _stop_after_takeover() -> None:
    get_logger().error("stopping: another command has taken over the output, because this one was suspended")
    _thread.interrupt_main()


def _complete(job: Preparation) -> Manifest:
    """Completes an output that this process holds."""
    config, output, plan = job.config, job.output, job.plan
    address = named_cluster(output.session.address, "session.address")
    if not in_session() and (problem := cluster_problem(*address)):
        raise ConfigError("prepare", [problem])  # before minutes of a tokenizer's training
    output.write_plan(plan)
    tokenizer = write_shared_files(job, output.folder)
    output.share()
    sidecars = run_stages(job, tokenizer)
    counts = sum_counts([sidecar.counts for sidecar in sidecars])
    sources = [part.source for unit in job.units for part in unit.parts]
    hint = lines_hint(counts.read, counts.dropped, plan.config, sources)
    failures = examples_of(sidecars)
    if nothing := nothing_kept(counts, config, failures):
        output.discard()
        raise ConfigError("prepare", [nothing, hint] if hint else [nothing])
    losses = sum_losses(sidecar.losses for sidecar in sidecars)
    if problem := too_many_failed(counts, failures, config.max_error_rate, config.content.kind, losses):
        raise ShardError(problem)
    # Without the evaluation sets: their index was built once, before the first unit.
    digests = fingerprints(config.filters.model_copy(update={"contamination": None}))
    if changed := [setting for setting, digest in digests.items() if plan.files[setting] != digest]:
        raise ShardError(
            f"{', '.join(changed)}: its file was changed while {output.name} was written, whose documents were chosen "
            "by different lists; name a new folder in output, or delete this one"
        )
    manifest = build_manifest(sidecars, tokenizer, config.geometry, plan.config, plan.config_hash, plan.skipped)
    write_text(output.folder / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
    output.complete()  # after the manifest: a kill in between leaves what the next command removes
    for line in filter(None, [hint, *losses_hint(losses, config.content.kind), unknown_hint(manifest)]):
        get_logger().warning(line)
    return manifest


def plan_ahead(config: PipelineConfig, cpus: int | None = None) -> Estimate:
    """Estimates the result of `prepare` from a sample.

    The output is only read, because another command may be working in it. The time is that on `cpus` CPUs, at least 1;
    None: on those of the session.
    """
    with _planned(config) as job:
        folder = job.output.folder
        try:
            with tempfile.TemporaryDirectory(prefix="declutr-plan-") as work:
                if (folder / TOKENIZER).exists():
                    shutil.copytree(folder / TOKENIZER, Path(work, TOKENIZER))
                if (folder / INDEX).exists():
                    shutil.copyfile(folder / INDEX, Path(work, INDEX))
                return estimate(job, Path(work), write_shared_files(job, Path(work)), cpus)
        except OSError as error:
            raise ShardError(f"--plan: {error}; nothing was written") from error


@contextmanager
def _planned(config: PipelineConfig, verify: bool = False) -> Iterator[Preparation]:
    """Plans a command, or raises all problems at once. In the block, an output in a store has a folder on this host."""
    if messages := list(refused_settings(config.model_dump(mode="json"))):
        raise ConfigError("prepare", messages)
    places, skipped = look(config.model_dump()), Skipped()
    units, unreadable, output, plan = list[Unit](), list[str](), None, None
    if not any(problem.startswith("corpus.") for problem in places):  # problems begin with their setting
        unit_mib, units, unreadable = fit_units(config.corpus, config.unit_mib, skipped, config.content)
        config = config.model_copy(update={"unit_mib": unit_mib})
        # before a tokenizer is trained; files at an address may have an unknown size
        if units and not any(unit.num_bytes or is_remote(unit.parts[0].path) for unit in units):
            unreadable += filter(None, [nothing_kept(sum_counts([]), config)])
    with ExitStack() as stack:
        if not any(problem.startswith("output ") for problem in places):
            try:
                output = stack.enter_context(open_output(config))
            except OSError as error:
                places.append(f"output = {config.output!r}: {error}")
        messages = [*unreadable, *places, *filter_problems(config.filters)]
        wrong_name = any("tokenizer.name" in problem for problem in messages)
        if not messages and output is not None:  # missing inputs would also be reported as changed inputs
            units = with_file_states(units, config.storage_retry_seconds)
            plan = plan_of(config, units, skipped.kinds())
            for line in describe_skipped(plan.skipped):
                get_logger().warning(line)
            messages += output.problems(plan) or output.input_problems(plan, units, verify)
        tokenizer = config.tokenizer
        saved = plan is not None and output is not None and (output.folder / TOKENIZER).exists()
        if isinstance(tokenizer, PretrainedTokenizer) and not wrong_name:
            try:
                if not saved or output is None:
                    load_tokenizer(tokenizer.name, tokenizer.trust_remote_code)
                elif was_replaced(tokenizer.name, tokenizer.trust_remote_code, output.folder / TOKENIZER):
                    messages.append(
                        f"tokenizer.name = {tokenizer.name!r}: was changed after {output.name} was begun with it; put "
                        "the earlier one back, or name a new folder in output"
                    )
            except ConfigError as error:
                messages += error.problems
        if messages or plan is None or output is None:
            raise ConfigError("prepare", messages)
        yield Preparation(config, units, plan, output)


@answered
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `prepare CONFIG [key=value ...] [--print-config]`; returns the exit status."""
    parser = config_parser("prepare")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.cpus is not None and (arguments.cpus < 1 or not arguments.plan):
        reason = "must be at least 1" if arguments.plan else "needs --plan; session.num_cpus limits a preparation"
        parser.error(f"--cpus {arguments.cpus}: {reason}")
    setup_logging("prepare")
    config = load_config(arguments.config, "prepare", PipelineConfig, arguments.overrides, look)
    if arguments.print_config:
        sys.stdout.write(annotated_yaml(config))
        return 0
    if arguments.plan:
        sys.stdout.write("\n".join(plan_ahead(config, arguments.cpus).lines) + "\n")
        return 0
    manifest = prepare(config, verify_inputs=arguments.verify_inputs)
    sys.stdout.write(summary(manifest, config.output) + "\n")
    if hint := labels_hint(manifest):
        sys.stdout.write(hint + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
