"""SimCSE, SCD, SCL and DeCLUTR from the same start: small encoders, paired seeds, ordinary runs.

    python -m benchmarks.quality.siblings --json OUT
    python -m benchmarks.quality.siblings --start ENCODER [--start-layers 3] --json OUT

Without --start, an encoder of 3 layers of 192 is first trained with MLM alone on documents. --start names a folder with
an encoder of transformers, of which --start-layers keeps the lower layers: for example the folder of all-MiniLM-L6-v2,
with 3 layers. Its tokenizer is used, too.

All methods and seeds start from the same encoder and have the same number of steps. A seed decides the order of the
rows, dropout and new layers. The scores are those of the last step: nothing is chosen by them. Premises of the pairs
that are scored are in no training data.

Preparing and training are ordinary `declutr` commands in --work, with their settings in NAME.yaml and their output in
NAME.log. The same command resumes after an interruption.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks import record
from benchmarks.quality.encoders import declutr, once
from benchmarks.quality.sibling_inputs import keep_lower_layers, split_nli
from benchmarks.quality.sibling_runs import MAX_TOKENS, METHODS, PAIRS, prepare_settings, run_settings, start_settings
from declutr.common.storage import atomic_folder, read_json, write_text
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.checkpoints.exported import EXPORT
from declutr.trainer.driver.summary import SUMMARY
from declutr.trainer.metrics.config import STSB
from declutr.trainer.metrics.metrics import read_metrics
from declutr.trainer.metrics.sts import StsValidator, read_judged, together
from declutr.trainer.objectives.held_out import held_out_rows
from declutr.trainer.objectives.text_packing import TextPacker
from declutr.trainer.objectives.text_validation import TextValidator
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.setup.build import build_encoder, load_tokenizer, max_content
from declutr.trainer.setup.config import TrainConfig

_STSB = Path("senteval/downstream/STS/STSBenchmark")
_SCORES = {"stsb_dev": STSB, "uniformity": "uniformity", "alignment": "alignment", "recall_at_1": "recall_at_1"}
"""Names in the figures, and in the metrics of a run."""
_COLUMNS = {"stsb_dev": "STS-B dev", "recall_at_1": "recall@1, %", "alignment": "alignment", "uniformity": "uniformity"}
_LAST_STEPS = 50


def main(arguments: list[str] | None = None) -> None:
    """Prepare, train, score; print and write."""
    given = _options().parse_args(arguments)
    facts = record.facts("quality.siblings", given.commit)
    data, stsb = given.data.resolve(), given.data.resolve() / _STSB
    work = given.work.resolve() / _name_of_start(given)
    split_nli(data / "nli", work / "nli")
    source = None if given.start is None else _given_start(given, work)
    needed = {
        "pairs-dev",
        *(METHODS[name].shards for name in given.methods),
        *(auxiliary for name in given.methods if (auxiliary := METHODS[name].auxiliary)),
        *(["documents"] if source is None else []),
    }
    prepared = {name: each for name, each in prepare_settings(data, work, source).items() if name in needed}
    for name, settings in prepared.items():
        _run(work, f"prepare-{name}", "prepare", settings)
    if source is None:
        _run(work, "mlm", "train", start_settings(work, stsb, given.mlm_steps))
    start = source or work / "mlm" / EXPORT
    pairs = work / "shards" / "pairs-dev"
    scored_start = score(start, pairs, stsb)
    record.progress(f"start {work.name}: {_line(scored_start)}")
    runs = []
    for seed in range(given.seed, given.seed + given.seeds):  # by seed first, so that every method has one soon
        for name in given.methods:
            settings = run_settings(name, seed, work, start, stsb, given.steps, given.lr, source is None)
            _run(work, f"{name}-{seed}", "train", settings)
            run = Path(settings["run"])
            found = scores_of_run(run, score(run / EXPORT, pairs, stsb), scored_start) | task_losses(run, settings)
            record.progress(f"{name}, seed {seed}: {_line(found)}")
            runs.append({"method": name, "seed": seed, "start": work.name, **found})
    figures = {
        "benchmark": "siblings",
        "start": {"name": work.name, "mlm_steps": None if source else given.mlm_steps, "scores": scored_start},
        "seeds": given.seeds,
        "steps": given.steps,
        "lr": given.lr,
        "rows": {name: read_json(work / "shards" / name / "manifest.json")["totals"] for name in prepared},
        "runs": runs,
        **facts,
    }
    record.progress("\n".join(table(figures)))
    record.publish(figures, given.json)


def _options() -> argparse.ArgumentParser:
    options = record.parser("quality.siblings", __doc__)
    options.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder with corpus, nli, wiki and senteval"
    )
    options.add_argument("--start", type=Path, metavar="ENCODER", help="folder of the encoder to start from")
    options.add_argument("--start-layers", type=int, metavar="N", help="keep only its lower N layers")
    options.add_argument("--work", type=Path, default=Path("runs/siblings"), help="shards and runs; kept")
    options.add_argument(
        "--methods",
        nargs="+",
        choices=tuple(METHODS),
        default=list(METHODS),
        metavar="METHOD",
        help=f"default: {' '.join(METHODS)}",
    )
    options.add_argument("--seeds", type=int, default=3, help="number of seeds, from --seed on")
    options.add_argument("--steps", type=int, default=500, help="steps of each run")
    options.add_argument("--mlm-steps", type=int, default=2000, help="steps of the own start")
    options.add_argument("--lr", type=float, default=1e-4, help="largest learning rate of the runs, for all methods")
    return options


def _name_of_start(given: argparse.Namespace) -> str:
    if given.start is None:
        return "own"
    name: str = given.start.resolve().name
    return name if given.start_layers is None else f"{name}-{given.start_layers}layers"


def _given_start(given: argparse.Namespace, work: Path) -> Path:
    """Folder of the encoder to start from; with --start-layers, a new folder with its lower layers."""
    source: Path = given.start.resolve()
    if given.start_layers is None:
        return source
    target = work / "start"
    if not target.is_dir():
        with atomic_folder(target) as aside:
            keep_lower_layers(source, given.start_layers, aside)
    return target


def _run(work: Path, name: str, command: str, settings: dict[str, Any]) -> None:
    """Run a `declutr` command with these settings, unless it has succeeded before."""
    work.mkdir(parents=True, exist_ok=True)
    config = work / f"{name}.yaml"
    write_text(config, yaml.safe_dump({command: settings}, sort_keys=False))
    once(work, name, declutr(command, config), settings)


def score(encoder_folder: Path, shards: Path, stsb: Path) -> dict[str, float]:
    """The scores of an encoder as the validation of a run computes them, on all pairs of the shards and on STS-B."""
    tokenizer, vocabulary = load_tokenizer(shards)
    encoder_settings = {"pretrained": str(encoder_folder), "pooling": "mean"}
    config = TrainConfig(run="none", data=str(shards), encoder=encoder_settings)
    encoder = build_encoder(config, tokenizer).eval()
    rows = ShardSet(shards, "train")
    room, cpu = max_content(encoder, vocabulary), torch.device("cpu")
    packer = TextPacker(vocabulary, min(room, MAX_TOKENS - vocabulary.num_specials), seed=0)
    chosen = held_out_rows(rows.num_documents, rows.num_documents, seed=0)
    pairs = read_judged(STSB, stsb, tokenizer, room + vocabulary.num_specials)
    validator = together(
        [TextValidator(packer, rows, chosen, [], Communicator(), cpu), StsValidator(pairs, [], Communicator(), cpu)]
    )
    return _named((validator.scores(encoder) if validator else None) or {})


def _named(scores: Mapping[str, float]) -> dict[str, float]:
    return {name: round(scores[key], 6) for name, key in _SCORES.items() if key in scores}


def scores_of_run(run: Path, last: Mapping[str, float], start: Mapping[str, float]) -> dict[str, Any]:
    """Steps, seconds and scores of a finished run.

    Its own validation scores the half of the rows that may choose a checkpoint: `stsb_by_step`.

    Args:
        run: folder of the run.
        last: scores of its exported encoder.
        start: scores of the encoder that it started from.
    """
    summary = read_json(run / SUMMARY)
    lines = [line for line in read_metrics(run) if line["kind"] == "validation"]
    return {
        "steps": summary["steps"],
        **last,
        "start_scores": dict(start),
        "stsb_by_step": {str(line["step"]): round(line[STSB], 3) for line in lines},
        "seconds": round(summary["seconds"], 1),
    }


def task_losses(run: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Loss of each auxiliary task, as the mean of its last steps, and that of embeddings that are all equal.

    Equal embeddings of the 2N views of a batch have the loss ln(2N - 1): chance.
    """
    steps = [line for line in read_metrics(run) if line["kind"] == "step"][-_LAST_STEPS:]
    return {
        f"{name}_loss": {
            "mean_of_last_steps": round(statistics.fmean(step[f"{name}_supcon"] for step in steps), 4),
            "chance": round(math.log(2 * task["batch_documents"] - 1), 4),
        }
        for name, task in settings.get("auxiliary_tasks", {}).items()
    }


def _line(scores: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {scores[name]:.3f}" for name in _SCORES if name in scores)


def table(figures: Mapping[str, Any]) -> Iterator[str]:
    """Markdown tables: scores by method with mean and spread over the seeds, and differences seed by seed."""
    runs, start = figures["runs"], figures["start"]
    yield f"| after {figures['steps']} steps | {' | '.join(_COLUMNS.values())} |"
    yield "| --- | " + " | ".join(["---:"] * len(_COLUMNS)) + " |"
    yield f"| start: {start['name']} | " + " | ".join(_cell(name, [start["scores"]]) for name in _COLUMNS) + " |"
    methods: dict[str, list[Mapping[str, Any]]] = {one["method"]: [] for one in runs}
    for one in runs:
        methods[one["method"]].append(one)
    for method, found in methods.items():
        yield f"| {method} | " + " | ".join(_cell(name, found) for name in _COLUMNS) + " |"
    names = ("stsb_dev", "recall_at_1")
    pairs = [(one, other) for one, other in PAIRS if {one, other} <= methods.keys()]
    if not pairs:
        return
    yield ""
    yield f"| difference, seed by seed | {' | '.join(_COLUMNS[name] for name in names)} |"
    yield "| --- | " + " | ".join(["---:"] * len(names)) + " |"
    for one, other in pairs:
        both = [{name: left[name] - right[name] for name in names} for left, right in _paired(methods, one, other)]
        yield f"| {one} over {other} | " + " | ".join(_cell(name, both, sign="+") for name in names) + " |"


def _paired(
    methods: Mapping[str, Sequence[Mapping[str, Any]]], one: str, other: str
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Runs of two methods with the same seed."""
    by_seed = {run["seed"]: run for run in methods[other]}
    return ((run, by_seed[run["seed"]]) for run in methods[one] if run["seed"] in by_seed)


def _cell(name: str, scores: Sequence[Mapping[str, float]], sign: str = "") -> str:
    """Mean and standard deviation (n - 1) of a score."""
    values = [one[name] * (100 if name == "recall_at_1" else 1) for one in scores]
    digits = f"{sign}.1f" if name in ("stsb_dev", "recall_at_1") else ".3f"
    mean = format(statistics.fmean(values), digits)
    return mean if len(values) == 1 else f"{mean} ± {format(statistics.stdev(values), digits.lstrip('+'))}"


if __name__ == "__main__":
    main()
