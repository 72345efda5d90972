"""Adaptation of a real encoder to documents of several sources: is the verdict right?

    python -m benchmarks.adapt --start ENCODER --corpus FOLDER --stsb FOLDER --json OUT

Settings were chosen on acl-papers, rust-rfcs, swift-evolution and kubernetes-keps; python-peps, ethereum-eips and
scotus-2009-2011 were not opened for them. On finished runs (`--work`), `--calibrate N` swaps start and candidates at
random: how often does the verdict say "better" of nothing, and how often does it find a planted gain?
"""

import argparse
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from declutr.adaptation.candidates import CandidateBuilder, load_transformer
from declutr.adaptation.config import AdaptConfig
from declutr.adaptation.job import adapt
from declutr.adaptation.passages import F64
from declutr.adaptation.result import Result, Row
from declutr.adaptation.scores import DISTANT, HEADINGS, Values, choose, judge
from declutr.common.bootstrap import Comparison, compare, spearman
from declutr.common.storage import read_json
from declutr.evaluation.retrieval.compare import stsb_values

DEVELOPED_ON = ("acl-papers", "rust-rfcs", "swift-evolution", "kubernetes-keps")
UNTOUCHED = ("python-peps", "ethereum-eips", "scotus-2009-2011")
_SHUFFLED_WORDS = 40
_GAINS = (0.02, 0.03)
"""Planted gains in recall@1, of calibration."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = record.parser("adapt", __doc__)
    parser.add_argument("--start", type=Path, required=True, help="folder of an encoder of sentence-transformers")
    parser.add_argument("--corpus", type=Path, help="folder with SOURCE.jsonl.gz")
    parser.add_argument("--sources", nargs="+", choices=(*DEVELOPED_ON, *UNTOUCHED), default=UNTOUCHED)
    parser.add_argument("--stsb", type=Path, help="folder with STS-B's sts-test.csv")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of split and training")
    parser.add_argument("--minutes", type=float, default=30, help="of each run")
    parser.add_argument("--most-documents", type=int, nargs="+", help="also with only this many documents")
    parser.add_argument("--shuffled", action="store_true", help="passages change documents: nothing can be learned")
    parser.add_argument("--calibrate", type=int, metavar="N", help="repetitions of the calibration, on finished runs")
    parser.add_argument("--work", type=Path, default=Path("runs/adapt-benchmark"), help="folder of the runs")
    options = record.parse(parser, arguments)
    if options.calibrate:
        record.publish({"calibration": list(_calibrations(options))}, options)
        return
    if options.corpus is None:
        parser.error("--corpus is missing: give the folder with SOURCE.jsonl.gz")
    runs: list[dict[str, Any]] = []
    for source in options.sources:
        for limit in (None, *(options.most_documents or ())):
            for seed in range(options.seeds if limit is None else 1):
                runs += _runs(options, source, limit, seed)
                record.publish({"runs": runs}, options)


def _corpus(options: argparse.Namespace, source: str, limit: int | None) -> Path:
    """The documents of a source as a file."""
    path: Path = options.work / f"{source}{'' if limit is None else f'-{limit}'}{'-shuffled' * options.shuffled}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(options.corpus / f"{source}.jsonl.gz", "rt", encoding="utf-8") as stream:
            lines = list(islice(stream, limit))
        path.write_text("".join(_shuffled(lines) if options.shuffled else lines), encoding="utf-8")
    return path


def _shuffled(lines: Sequence[str]) -> Iterator[str]:
    """The same documents as lines of JSON, each with as many passages of any documents as it had."""
    words = [json.loads(line)["text"].split() for line in lines]
    passages = [text[at : at + _SHUFFLED_WORDS] for text in words for at in range(0, len(text), _SHUFFLED_WORDS)]
    order = iter(np.random.default_rng(0).permutation(len(passages)))
    for text in words:
        count = -(-len(text) // _SHUFFLED_WORDS)
        yield json.dumps({"text": " ".join(word for place in islice(order, count) for word in passages[place])}) + "\n"


def _runs(options: argparse.Namespace, source: str, limit: int | None, seed: int) -> Iterator[dict[str, Any]]:
    """One entry for each row of the table of a run."""
    corpus = _corpus(options, source, limit)
    output = options.work / f"{corpus.stem}-seed{seed}"
    result = adapt(options.start, corpus, output, stsb=options.stsb, minutes=options.minutes, seed=seed)
    same = {"source": source, "seed": seed, "documents": result.facts["documents"], "steps": result.facts["steps"]}
    for row in result.rows[1:]:
        chosen = row.name == result.chosen
        yield same | {
            "recipe": row.name,
            "chosen": chosen,
            "verdict": result.verdict.outcome if chosen else None,
            "seconds": result.facts["seconds"],
            **_differences(row.differences, _stsb(options, row, output, result, seed)),
        }


def _differences(comparisons: Mapping[str, Comparison], stsb: Comparison | None) -> dict[str, Any]:
    compared = {"distant": comparisons.get(DISTANT), "queries": comparisons.get(HEADINGS), "stsb": stsb}
    return {name: comparison and points(comparison) for name, comparison in compared.items()}


def _stsb(options: argparse.Namespace, row: Row, output: Path, result: Result, seed: int) -> Comparison | None:
    """Difference of a candidate on STS-B's test set."""
    if row.name == result.chosen:
        return result.stsb
    if row.kind != "candidate" or options.stsb is None:
        return None
    builder = CandidateBuilder(
        AdaptConfig(encoder=str(options.start), corpus=["-"]), output / "data", output / "candidates"
    )
    other = load_transformer(str(builder.place(row.name)))
    return compare(_start_values(options.start, options.stsb), stsb_values(other, options.stsb), seed, spearman)


@cache
def _start_values(start: Path, stsb: Path) -> F64:
    return stsb_values(load_transformer(str(start)), stsb)


def points(difference: Comparison) -> dict[str, Any]:
    """A difference in points, with the ends of its interval and the number of rows."""
    low, high = (None, None) if difference.interval is None else (100 * end for end in difference.interval)
    return {"value": 100 * difference.difference, "low": low, "high": high, "rows": difference.rows}


def _calibrations(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Counts verdicts "better" of exchangeable encoders and of ones with a planted gain, by finished run."""
    for state in sorted(options.work.glob("*/state.json")):
        files = [state.parent / "scores" / name for name in ("development.json", "test.json")]
        if not all(file.is_file() for file in files):
            continue
        development, test = map(_values, files)
        rng = np.random.default_rng(options.seed)
        outcomes: dict[float, list[str]] = {gain: [] for gain in (0.0, *_GAINS)}
        for repetition in range(options.calibrate):
            first, second = _swapped(development, rng), _swapped(test, rng)
            for gain, verdicts in outcomes.items():
                chosen_on, judged_on = _planted(first, gain, rng), _planted(second, gain, rng)
                chosen = choose([name for name in chosen_on if name != "start"], chosen_on, DISTANT, repetition)
                verdicts.append(judge(judged_on["start"], judged_on[chosen], DISTANT, repetition).outcome)
        yield {
            "run": state.parent.name,
            "repetitions": options.calibrate,
            "better_by_planted_points": {100 * gain: verdicts.count("better") for gain, verdicts in outcomes.items()},
        }


def _values(path: Path) -> dict[str, Values]:
    return {name: {DISTANT: np.array(scores[DISTANT], np.float64)} for name, scores in read_json(path).items()}


def _swapped(half: dict[str, Values], rng: np.random.Generator) -> dict[str, Values]:
    """Start and candidates, in a random order for each document: no one of them is better than another."""
    table = rng.permuted(np.stack([values[DISTANT] for values in half.values()]), axis=0)
    return {name: {DISTANT: row} for name, row in zip(half, table, strict=True)}


def _planted(half: dict[str, Values], gain: float, rng: np.random.Generator) -> dict[str, Values]:
    """Candidates that find more: values of documents are raised by `gain` on average."""
    return {
        name: values if name == "start" else {DISTANT: values[DISTANT] + rng.exponential(gain, len(values[DISTANT]))}
        for name, values in half.items()
    }


if __name__ == "__main__":
    main()
