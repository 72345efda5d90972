"""Speed of SentEval against the official procedure, and equality of the scores.

Task by task on the same embeddings, one thread per process, the two sides in turns; the first side changes from task to
task. The time covers everything after the embeddings: features, folds, classifiers, correlations. The encoders are a
transformer with random weights from a fixed seed and a bag of hashed words. Neither needs a download, and both are the
same everywhere.

    python -m benchmarks.senteval --senteval CHECKOUT --json OUT

On complete data the official preset takes long: MR alone is 410 fits of seconds each. With `--keep FOLDER` the same
command resumes with the task that was interrupted, and processes with different `--encoders` share their measurements.

A checkout (read at 5d6dc11) does not run on current Python and numpy versions, nor without CUDA. Shims for all three
leave its computations unchanged.
"""

import argparse
import contextlib
import importlib
import inspect
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import record
from benchmarks.embed import SIZES, write_encoder
from declutr.common.storage import atomic_folder, hash_json, read_json, write_json
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import SentenceEncoder
from declutr.encoders.words import HashedWords
from declutr.evaluation.senteval import data as checking
from declutr.evaluation.senteval.harness import embed_all, texts_hash
from declutr.evaluation.senteval.network import ClassifierConfig
from declutr.evaluation.senteval.scores import Embeddings, cost, headline, score
from declutr.evaluation.senteval.tasks import EMPTY, Inspection, TaskData, choose_tasks, find, sentence_rows, sentences

Array = NDArray[Any]
Scores = dict[str, float]
_HUNDREDTHS = ("acc", "devacc", "f1")  # already in percent; correlations are not
_SHORT = {"num_folds": 2, "max_epoch": 2, "epoch_size": 1, "tenacity": 0}


class _Over:
    """Module as released code sees it, with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        names = self.__dict__["_names"]
        return names[name] if name in names else getattr(self.__dict__["_module"], name)


class Checkout:
    """The released code itself.

    Args:
        folder: folder of the checkout.
        data: folder with `downstream` and `probing`, which it reads with its own loaders.
    """

    name = "facebookresearch/SentEval"

    def __init__(self, folder: Path, data: Path) -> None:
        if not (folder / "senteval" / "engine.py").is_file():
            raise ValueError(f"{folder}: not a checkout of facebookresearch/SentEval: senteval/engine.py is missing")
        self.data = data
        sys.path.insert(0, str(folder))
        try:
            self.engine: ModuleType = importlib.import_module("senteval.engine")
        finally:
            sys.path.remove(str(folder))

    def score(
        self, data: TaskData, rows: Mapping[str, int], embeddings: Array, config: ClassifierConfig
    ) -> tuple[Scores, Array]:
        """Return a task's scores, and its wall and processor seconds."""
        started: list[Array] = []

        def batcher(_: Any, batch: Sequence[Sequence[str]]) -> Array:
            return embeddings[[rows[" ".join(words) or EMPTY] for words in batch]]

        classifier = {
            "nhid": config.num_hidden,
            "optim": config.optimizer,
            "batch_size": config.batch_size,
            "tenacity": config.tenacity,
            "epoch_size": config.epoch_size,
            "dropout": config.dropout,
            "max_epoch": config.max_epoch,
        }
        params = {"task_path": str(self.data), "usepytorch": True, "kfold": config.num_folds, "classifier": classifier}
        with _today():
            engine = self.engine.SE({**params, "seed": config.seed}, batcher, lambda *_: started.append(record.now()))
            results = engine.eval(data.task.name)
            elapsed = record.now() - started[-1]
        return _flat(results), elapsed


def _flat(results: Mapping[str, Any]) -> Scores:
    """Rename the released code's results to this project's names."""
    if "all" in results:
        kinds = ("spearman", "pearson")
        return {f"{kind}.{way}": float(results["all"][kind][way]) for kind in kinds for way in ("mean", "wmean")}
    names = ("acc", "devacc", "f1", "devpearson", "pearson", "spearman", "mse")
    return {name: float(results[name]) for name in names if name in results}


@contextlib.contextmanager
def _today() -> Iterator[None]:
    """Apply the shims while released code runs."""

    def stay(self: Any, *_: Any, **__: Any) -> Any:  # of `.cuda()`, which it calls without a condition
        return self

    def ragged(values: Any, *arguments: Any, **options: Any) -> Array:
        try:
            return np.array(values, *arguments, **options)
        except ValueError:  # numpy makes no ragged arrays since 1.24
            return np.array(values, dtype=object)

    cuda = _Over(torch.cuda, is_available=lambda: True, manual_seed=lambda _: None)
    seen = _Over(torch, device=lambda _: torch.device("cpu"), cuda=cuda)
    replaced = {
        "torch": (torch, seen),
        "np": (np, _Over(np, array=ragged)),
        # Python has no `getargspec` since 3.11.
        "inspect": (inspect, _Over(inspect, getargspec=inspect.getfullargspec)),
    }
    with contextlib.ExitStack() as stack:
        for owner in (torch.Tensor, torch.nn.Module):
            stack.enter_context(patch.object(owner, "cuda", stay))
        for path, module in list(sys.modules.items()):
            for name, (real, shim) in replaced.items() if path.partition(".")[0] == "senteval" else ():
                if getattr(module, name, None) is real:
                    stack.enter_context(patch.object(module, name, shim))
        yield


def main(arguments: list[str] | None = None, official: Checkout | None = None) -> None:
    """Measure, print and write; `official` is the other side, by default the checkout."""
    options = record.parse(_parser(), arguments)
    data = options.data or options.senteval / "data"
    config = ClassifierConfig.official() if options.preset == "official" else ClassifierConfig.prototyping()
    if options.short:
        config = config.model_copy(update=_SHORT)
    torch.set_num_threads(1)  # steps are many and small: threads would wait for each other
    official = official or Checkout(options.senteval, data)
    inspections, left_out = _at_hand(choose_tasks(options.tasks.split(",")), data, config)
    if not inspections:
        raise SystemExit(f"{data}: no data for any task of {options.tasks}; give their folder with --data FOLDER")
    rows = sentence_rows(inspection.data for inspection in inspections if inspection.data)
    figures: dict[str, Any] = {
        "official": official.name,
        "preset": "short" if options.short else options.preset,
        "data": {inspection.task.name: inspection.standing for inspection in inspections},
        "left_out": left_out,
    }
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = options.keep or Path(name)
        for encoder in _encoders(options, folder, list(rows)):
            embeddings = embed_all(encoder, list(rows), folder / "embeddings", record.progress).take(
                np.arange(len(rows))
            )
            for inspection in inspections:
                # The first side changes, so that neither always runs on a machine warmed by the other.
                task, turn = inspection.task.name, len(measured) % 2
                made_of = [encoder.fingerprint, task, config.model_dump(mode="json"), official.name]
                identity = f"{task}-{hash_json([*made_of, texts_hash(list(rows))])[:16]}"
                path = folder / f"{identity}.json"
                if not path.is_file():  # MR alone is 410 fits of seconds each
                    result = _task(inspection, encoder.name, rows, embeddings, config, official, turn)
                    write_json(path, {**result, "commit": options.facts["commit"]})
                measured.append(read_json(path))
    record.progress("\n".join(table(measured)))
    record.publish({**figures, **_totals(measured), "tasks": measured}, options)


def _parser() -> argparse.ArgumentParser:
    options = record.parser("senteval", __doc__)
    options.add_argument(
        "--senteval", type=Path, required=True, metavar="DIR", help="checkout of facebookresearch/SentEval"
    )
    options.add_argument("--data", type=Path, help="folder with downstream and probing; default: DIR/data")
    options.add_argument("--tasks", default="all", help="names and sets, separated by commas")
    options.add_argument("--preset", choices=("official", "prototyping"), default="official")
    options.add_argument("--encoders", default="transformer,hashed-words", help="one or both, separated by a comma")
    options.add_argument("--model", choices=SIZES, default="small", help="size of the transformer")
    options.add_argument("--hashed-size", type=int, default=300, help="numbers in an embedding of hashed words")
    options.add_argument("--vocab-size", type=int, default=16_000)
    options.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="stores measurements and reuses those of earlier calls"
    )
    options.add_argument("--short", action="store_true", help="a few passes and two folds: a test, not a result")
    return options


def _at_hand(names: Sequence[str], data: Path, config: ClassifierConfig) -> tuple[list[Inspection], dict[str, str]]:
    """Tasks that both sides can score, shortest first, and the reasons for leaving out the others."""
    inspections, left_out = [], {}
    for name in names:
        task = find(name)
        inspection = checking.inspect(task, data, allow_unchecked=True)
        if task.procedure == "retrieval":
            left_out[name] = "the released code reads pickles, which are never opened here"
        elif not inspection.usable:
            left_out[name] = inspection.reason.replace(str(data), "DATA")
        else:
            inspections.append(inspection)
    return sorted(inspections, key=lambda item: cost(item.data, "procedure", config) if item.data else 0), left_out


def _encoders(options: argparse.Namespace, folder: Path, texts: list[str]) -> list[SentenceEncoder]:
    encoders: list[SentenceEncoder] = []
    for kind in options.encoders.split(","):
        if kind == "hashed-words":
            encoders.append(HashedWords(options.hashed_size, options.seed))
        elif kind == "transformer":
            made_of = [options.model, options.vocab_size, options.seed, texts_hash(texts)]
            model = folder / f"encoder-{hash_json(made_of)[:16]}"
            if not model.is_dir():
                with atomic_folder(model) as aside:
                    sample = texts[:: max(1, len(texts) // 50_000)]
                    write_encoder(aside, options.model, sample, options.vocab_size, options.seed)
            encoders.append(load_encoder(str(model), device="cpu"))
        else:
            raise SystemExit(f"--encoders {kind}: must be transformer or hashed-words")
    return encoders


def _task(
    inspection: Inspection,
    encoder: str,
    rows: dict[str, int],
    embeddings: Embeddings,
    config: ClassifierConfig,
    official: Checkout,
    turn: int,
) -> dict[str, Any]:
    """Measure both sides of one task: scores, seconds, ratio, differences in points."""
    data, task = inspection.data, inspection.task
    if data is None:
        raise ValueError(f"{task.name}: no data")
    load = round(os.getloadavg()[0], 2)
    seconds: dict[str, list[float]] = {}  # wall and processor
    scores: dict[str, dict[str, float]] = {}
    for side in ("ours", "official") if turn else ("official", "ours"):
        if side == "ours":
            own = embeddings[[rows[text] for text in sentences(data)]]
            begun = record.now()
            scores[side] = dict(score(data, "procedure", own, config).scores)
            elapsed = record.now() - begun
        else:
            scores[side], elapsed = official.score(data, rows, embeddings, config)
        seconds[side] = elapsed.tolist()
        record.progress(f"{encoder} {task.name} {side} {elapsed[0]:.1f} s {headline(task.name, scores[side]):.2f}")
    compared = sorted(scores["ours"].keys() & scores["official"].keys() - {"mse"})
    points = {name: 1.0 if name in _HUNDREDTHS else 100.0 for name in compared}
    apart = {name: abs(scores["ours"][name] - scores["official"][name]) * points[name] for name in compared}
    return {
        "task": task.name,
        "encoder": "hashed-words" if encoder.startswith("hashed-words") else "transformer",
        "rows": data.num_rows,
        "load_average": load,
        "ratio": round(seconds["official"][1] / max(seconds["ours"][1], 1e-9), 3),
        "ratio_wall": round(seconds["official"][0] / max(seconds["ours"][0], 1e-9), 3),
        "score_diff": round(abs(headline(task.name, scores["ours"]) - headline(task.name, scores["official"])), 6),
        "largest_diff": round(max(apart.values()), 6),
        **{
            side: {
                "score": round(headline(task.name, scores[side]), 4),
                "seconds": round(seconds[side][0], 3),
                "cpu_seconds": round(seconds[side][1], 3),
                "scores": {name: round(scores[side][name], 6) for name in compared},
            }
            for side in ("ours", "official")
        },
    }


def table(measured: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown table: a row per task with official score, ours and the difference in points, for each encoder."""
    by_name = {(row["task"], row["encoder"]): row for row in measured}
    tasks, encoders = ({row[kind]: None for row in measured} for kind in ("task", "encoder"))
    yield f"| task | rows | {' | '.join(f'{encoder}: official | ours | apart' for encoder in encoders)} |"
    yield "| --- | " + " | ".join(["---:"] * (1 + 3 * len(encoders))) + " |"
    for task in tasks:
        rows = [by_name[task, encoder] for encoder in encoders]
        cells = [
            f"{row['official']['score']:.2f} | {row['ours']['score']:.2f} | {row['score_diff']:.2f}" for row in rows
        ]
        yield f"| {find(task).label} | {rows[0]['rows']:,} | {' | '.join(cells)} |"


def _totals(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def total(side: str, kind: str) -> float:
        return sum(float(row[side][kind]) for row in measured)

    return {
        "ratio": round(total("official", "cpu_seconds") / max(total("ours", "cpu_seconds"), 1e-9), 3),
        "ratio_wall": round(total("official", "seconds") / max(total("ours", "seconds"), 1e-9), 3),
        "max_abs_score_diff": max(row["score_diff"] for row in measured),
        "max_abs_diff_of_any_score": max(row["largest_diff"] for row in measured),
        "seconds": {side: round(total(side, "seconds"), 2) for side in ("ours", "official")},
        "cpu_seconds": {side: round(total(side, "cpu_seconds"), 2) for side in ("ours", "official")},
    }


if __name__ == "__main__":
    main()
