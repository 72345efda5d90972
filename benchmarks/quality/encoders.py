"""Effect of the contrastive term: small encoders from scratch on SentEval's tasks, over several seeds.

    python -m benchmarks.quality.encoders --corpus FILES... --senteval DIR --work FOLDER --json OUT

A seed decides weights, order of documents, spans and masks. Each seed gives three encoders with the same initial
weights: untrained, trained with MLM only, and trained with DeCLUTR (contrastive term and MLM) for as many steps on the
same documents. Hashed words of the same size and seeds are compared with them. Preparing, training and scoring run as
separate `declutr` commands. The same command with the same `--work` resumes after an interruption. `--config` takes
another config than the demo's, for a larger encoder on a GPU. Without `--senteval` the encoders are only trained and
compared by their held-out scores.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from declutr.common.config import load_config
from declutr.common.storage import atomic_folder, hash_json, read_json, write_json
from declutr.evaluation.senteval.data.tasks import find
from declutr.trainer.checkpoints.exported import EXPORT
from declutr.trainer.driver.export import write_encoder
from declutr.trainer.driver.summary import SUMMARY
from declutr.trainer.setup.build import build_encoder, load_tokenizer
from declutr.trainer.setup.config import TrainConfig

KINDS = ("untrained", "mlm_only", "declutr", "hashed_words")
_TERMS = {"mlm_only": "mlm", "declutr": "both"}
_HELD_OUT = {"recall_at_1": "the passage that touches it", "distant_recall_at_1": "a passage far from it"}


def main(arguments: list[str] | None = None) -> None:
    """Prepare, train, score; print and write."""
    given = _options().parse_args(arguments)
    facts = record.facts("quality.encoders", given.commit)
    work, seeds = given.work.resolve(), range(given.seed, given.seed + given.seeds)
    shards = work / "shards"
    corpus = ["corpus.kind=files", f"corpus.paths={[str(path.resolve()) for path in given.corpus]}"]
    once(work, "prepare", declutr("prepare", given.config, *corpus, f"output={shards}"))
    encoders: dict[str, tuple[str, int]] = {}
    trained: list[dict[str, Any]] = []
    for seed in seeds:
        settings = [f"data={shards}", f"steps={given.steps}", f"seed={seed}"]
        settings += [f"validation.every_steps={given.steps}", f"checkpoint.every_steps={given.steps}"]
        untrained = work / f"untrained-{seed}"
        size = _untrained(load_config(given.config, "train", TrainConfig, settings), shards, untrained)
        encoders[str(untrained)] = "untrained", seed
        encoders[f"hashed-words@{seed}:{size}" if seed else f"hashed-words:{size}"] = "hashed_words", seed
        for kind, terms in _TERMS.items():
            run = work / f"{kind}-{seed}"
            once(work, run.name, declutr("train", given.config, *settings, f"run={run}", f"objective.terms={terms}"))
            encoders[str(run / EXPORT)] = kind, seed
            trained.append({"encoder": kind, "seed": seed, **_of_run(read_json(run / SUMMARY))})
    tasks: dict[str, Any] = {}
    if given.senteval is not None:
        names = sorted(encoders, key=lambda name: (KINDS.index(encoders[name][0]), encoders[name][1]))
        options = ["--data", given.senteval, "--allow-unchecked", "--tasks", given.tasks, "--preset", given.preset]
        scores = work / "scores"
        once(work, "evaluate", declutr("evaluate", *names, *options, "--output", scores))
        found = read_json(scores / "scores.json")["encoders"]
        tasks = {"preset": given.preset, "protocol": "senteval", **summarise(found, encoders)}
    figures = {
        "seeds": list(seeds),
        "steps": given.steps,
        "corpus": read_json(shards / "manifest.json")["totals"] | {"files": [path.name for path in given.corpus]},
        "train": load_config(given.config, "train", TrainConfig).model_dump(mode="json", exclude={"run", "data"}),
        **tasks,
        "held_out": held_out(trained),
        "training": trained,
        **facts,
    }
    record.progress("\n".join([*(table(figures) if tasks else ()), *held_out_table(figures["held_out"])]))
    record.publish(figures, given.json)


def _options() -> argparse.ArgumentParser:
    options = record.parser("quality.encoders", __doc__)
    options.add_argument("--corpus", type=Path, nargs="+", required=True, help="files of long English documents")
    options.add_argument("--senteval", type=Path, metavar="DIR", help="folder with downstream and probing")
    options.add_argument("--work", type=Path, default=Path("runs/encoders"), help="shards, runs, scores; kept")
    options.add_argument("--config", default="configs/demo.yaml", help="file with prepare and train sections")
    options.add_argument("--seeds", type=int, default=3, help="number of seeds, from --seed on")
    options.add_argument("--steps", type=int, default=240, help="steps of each training")
    options.add_argument("--tasks", default="all", help="names and sets, by commas; missing data are left out")
    options.add_argument(
        "--preset", choices=("official", "prototyping"), default="official", help="classifier settings"
    )
    return options


def declutr(*arguments: Any) -> list[str]:
    """Console command with its arguments, for this Python."""
    return [sys.executable, "-m", "declutr.cli.main", *map(str, arguments)]


def once(work: Path, name: str, command: list[str]) -> None:
    """Run a command, unless the same one has succeeded before; its output goes to `work/NAME.log`.

    Args:
        work: folder of marks and logs.
        name: name of the work.
        command: the command.

    Raises:
        SystemExit: the command failed; the message names its log.
    """
    mark, log = work / f"{name}.done.json", work / f"{name}.log"
    done = hash_json(command)
    if mark.is_file() and read_json(mark) == done:
        return
    record.progress(f"{name}: running; {log}")
    work.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        ended = subprocess.run(command, stdout=output, stderr=output)
    if ended.returncode:
        raise SystemExit(f"{name} ended with status {ended.returncode}; see {log}")
    write_json(mark, done)


def _untrained(config: TrainConfig, shards: Path, folder: Path) -> int:
    """Write the encoder in its state before training to a folder; return its size."""
    tokenizer, _ = load_tokenizer(shards)
    encoder = build_encoder(config, tokenizer)
    if not folder.is_dir():
        with atomic_folder(folder) as aside:
            write_encoder(encoder, tokenizer, aside)
    return encoder.hidden_size


def _of_run(summary: Mapping[str, Any]) -> dict[str, Any]:
    scores = {name: {when: summary[f"{when}_scores"][name] for when in ("first", "last")} for name in _HELD_OUT}
    return {"steps": summary["steps"], "seconds": summary["seconds"], **scores}


def summarise(scored: Sequence[Mapping[str, Any]], encoders: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """Tasks and averages, each with the scores of every seed, mean and spread, by kind of encoder.

    Args:
        scored: `encoders` of `scores.json`.
        encoders: kind and seed of each, by its name there.

    Raises:
        ValueError: an encoder has no score on a task that another encoder has.
    """
    headlines: dict[str, dict[str, dict[int, float]]] = {}
    standing: dict[str, str] = {}
    for one in scored:
        kind, seed = encoders[one["encoder"]]
        for task, result in one["protocols"]["senteval"]["results"].items():
            headlines.setdefault(task, {}).setdefault(kind, {})[seed] = result["headline"]
            standing[task] = result["standing"]
    asked = {(kind, seed) for kind, seed in encoders.values()}
    for task, kinds in headlines.items():
        if missing := asked - {(kind, seed) for kind, seeds in kinds.items() for seed in seeds}:
            raise ValueError(f"{task}: no score for {', '.join(f'{kind} {seed}' for kind, seed in sorted(missing))}")
    groups = {group: [task for task in headlines if find(task).group == group] for group in ("downstream", "probing")}
    averages = {
        f"mean of {len(tasks)} {group}": {
            kind: {seed: statistics.fmean(headlines[task][kind][seed] for task in tasks) for seed in seeds}
            for kind, seeds in headlines[tasks[0]].items()
        }
        for group, tasks in groups.items()
        if tasks
    }
    return {
        "tasks": {task: {"data": standing[task], **_spread(kinds)} for task, kinds in headlines.items()},
        "averages": {name: _spread(kinds) for name, kinds in averages.items()},
    }


def _spread(kinds: Mapping[str, Mapping[int, float]]) -> dict[str, dict[str, Any]]:
    """Scores in the order of the seeds, by kind of encoder, with mean and spread."""
    return {kind: _figures([kinds[kind][seed] for seed in sorted(kinds[kind])]) for kind in KINDS}


def _figures(values: Sequence[float]) -> dict[str, Any]:
    """Scores, their mean, their standard deviation (n - 1; None for one score)."""
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {
        "scores": [round(value, 4) for value in values],
        "mean": round(statistics.fmean(values), 4),
        "sd": None if sd is None else round(sd, 4),
    }


def held_out(trained: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Recall at 1 among held-out documents, by score and encoder, in the order of the seeds."""
    made = {}
    for name in _HELD_OUT:
        ends = {kind: [one[name]["last"] for one in trained if one["encoder"] == kind] for kind in _TERMS}
        made[name] = {"untrained": [one[name]["first"] for one in trained if one["encoder"] == "declutr"], **ends}
    return made


def table(figures: Mapping[str, Any]) -> Iterator[str]:
    """Markdown table of mean and standard deviation by task; `*`: own data, not comparable with papers."""
    yield from _head("", KINDS)
    rows = {
        find(task).label + ("" if found["data"] in ("identical", "published") else "*"): found
        for task, found in figures["tasks"].items()
    }
    for label, found in (rows | figures["averages"]).items():
        yield f"| {label} | {' | '.join(_cell(found[kind]) for kind in KINDS)} |"


def held_out_table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> Iterator[str]:
    """Markdown table of the held-out scores: recall@1 in percent."""
    kinds = KINDS[:3]
    yield from _head("recall@1, %", kinds)
    for name, words in _HELD_OUT.items():
        cells = (_cell(_figures([100 * value for value in found[name][kind]])) for kind in kinds)
        yield f"| {words} (`{name}`) | {' | '.join(cells)} |"


def _head(first: str, kinds: Sequence[str]) -> Iterator[str]:
    names = [kind.replace("_", " ").replace("mlm", "MLM").replace("declutr", "DeCLUTR") for kind in kinds]
    yield f"| {' | '.join([first, *names])} |".replace("|  |", "| |")
    yield "| --- | " + " | ".join(["---:"] * len(kinds)) + " |"


def _cell(found: Mapping[str, Any]) -> str:
    return f"{found['mean']:.1f}" if found["sd"] is None else f"{found['mean']:.1f} ± {found['sd']:.1f}"


if __name__ == "__main__":
    main()
