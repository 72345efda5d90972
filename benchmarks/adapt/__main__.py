"""Adaptation of a real encoder to documents of several sources, and the calibration of its verdict.

Settings were chosen on acl-papers, rust-rfcs, swift-evolution and kubernetes-keps; python-peps, ethereum-eips and
scotus-2009-2011 were not opened for them. `--calibrate N` swaps start and candidates at random instead: how often does
the verdict say "better" of nothing, and how often does it find a planted gain?
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

from benchmarks.adapt.references import points, references
from benchmarks.record import facts, parser, publish
from declutr.adaptation.candidates import CandidateBuilder
from declutr.adaptation.config import AdaptConfig
from declutr.adaptation.job import adapt, load_transformer
from declutr.adaptation.measures import F64
from declutr.adaptation.result import Result, Row
from declutr.adaptation.scores import DISTANT, HEADINGS, Values, choose, judge
from declutr.common.bootstrap import Comparison, compare, spearman
from declutr.common.storage import read_json
from declutr.evaluation.retrieval.similarity import stsb_values

DEVELOPED_ON = ("acl-papers", "rust-rfcs", "swift-evolution", "kubernetes-keps")
UNTOUCHED = ("python-peps", "ethereum-eips", "scotus-2009-2011")
_SHUFFLED_WORDS = 40
_GAINS = (0.02, 0.03)
"""Planted gains in recall@1, of calibration."""


def main() -> None:
    """Run the command."""
    options = parser("adapt", __doc__)
    options.add_argument("--start", type=Path, required=True, help="folder of an encoder of sentence-transformers")
    options.add_argument("--corpus", type=Path, required=True, help="folder with SOURCE.jsonl.gz")
    options.add_argument("--sources", nargs="+", choices=(*DEVELOPED_ON, *UNTOUCHED), default=UNTOUCHED)
    options.add_argument("--stsb", type=Path, help="folder with STS-B's sts-test.csv")
    options.add_argument("--seeds", type=int, default=3, help="seeds of split and training")
    options.add_argument("--minutes", type=float, default=30, help="of each run")
    options.add_argument("--most-documents", type=int, nargs="+", help="also with only this many documents")
    options.add_argument("--shuffled", action="store_true", help="passages change documents: nothing can be learned")
    options.add_argument("--references", action="store_true", help="also train SimCSE, MLM and others, with seed 0")
    options.add_argument("--calibrate", type=int, metavar="N", help="repetitions of the calibration, on finished runs")
    options.add_argument("--work", type=Path, default=Path("runs/adapt-benchmark"))
    given = options.parse_args()
    if given.calibrate:
        publish(facts("adapt", given.commit) | {"calibration": list(_calibrations(given))}, given.json)
        return
    runs: list[dict[str, Any]] = []
    for source in given.sources:
        for most in (None, *(given.most_documents or ())):
            for seed in range(given.seeds if most is None else 1):
                runs += _runs(given, source, most, seed)
                publish(facts("adapt", given.commit) | {"runs": runs}, given.json)


def _corpus(given: argparse.Namespace, source: str, most: int | None) -> Path:
    """The documents of a source as a file."""
    path: Path = given.work / f"{source}{'' if most is None else f'-{most}'}{'-shuffled' * given.shuffled}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(given.corpus / f"{source}.jsonl.gz", "rt", encoding="utf-8") as stream:
            lines = list(islice(stream, most))
        path.write_text("".join(_shuffled(lines) if given.shuffled else lines), encoding="utf-8")
    return path


def _shuffled(lines: Sequence[str]) -> Iterator[str]:
    """The same documents as lines of JSON, each with as many passages of any documents as it had."""
    words = [json.loads(line)["text"].split() for line in lines]
    passages = [one[at : at + _SHUFFLED_WORDS] for one in words for at in range(0, len(one), _SHUFFLED_WORDS)]
    order = iter(np.random.default_rng(0).permutation(len(passages)))
    for one in words:
        count = -(-len(one) // _SHUFFLED_WORDS)
        yield json.dumps({"text": " ".join(word for place in islice(order, count) for word in passages[place])}) + "\n"


def _runs(given: argparse.Namespace, source: str, most: int | None, seed: int) -> Iterator[dict[str, Any]]:
    """One entry for each row of the table of a run."""
    corpus = _corpus(given, source, most)
    output = given.work / f"{corpus.stem}-seed{seed}"
    result = adapt(given.start, corpus, output, stsb=given.stsb, minutes=given.minutes, seed=seed)
    same = {"source": source, "seed": seed, "documents": result.facts["documents"], "steps": result.facts["steps"]}
    for row in result.rows[1:]:
        chosen = row.name == result.chosen
        yield same | {
            "recipe": row.name,
            "chosen": chosen,
            "verdict": result.verdict.outcome if chosen else None,
            "seconds": result.facts["seconds"],
            **_differences(row.differences, _stsb(given, row, output, result, seed)),
        }
    if given.references and seed == 0 and most is None:
        config = AdaptConfig(
            encoder=str(given.start), corpus=[str(corpus)], stsb=given.stsb and str(given.stsb), minutes=given.minutes
        )
        for name, found, lost in references(config, output, int(result.facts["steps"])):
            yield same | {"recipe": name, "chosen": False, **_differences(found, lost)}


def _differences(found: Mapping[str, Comparison], stsb: Comparison | None) -> dict[str, Any]:
    compared = {"distant": found.get(DISTANT), "queries": found.get(HEADINGS), "stsb": stsb}
    return {name: one and points(one) for name, one in compared.items()}


def _stsb(given: argparse.Namespace, row: Row, output: Path, result: Result, seed: int) -> Comparison | None:
    """Difference of a candidate on STS-B's test set."""
    if row.name == result.chosen:
        return result.stsb
    if row.kind != "candidate" or given.stsb is None:
        return None
    builder = CandidateBuilder(
        AdaptConfig(encoder=str(given.start), corpus=["-"]), output / "data", output / "candidates"
    )
    other = load_transformer(str(builder.place(row.name)))
    return compare(_start_values(given.start, given.stsb), stsb_values(other, given.stsb), seed, spearman)


@cache
def _start_values(start: Path, stsb: Path) -> F64:
    return stsb_values(load_transformer(str(start)), stsb)


def _calibrations(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Counts verdicts "better" of exchangeable encoders and of ones with a planted gain, by finished run."""
    for state in sorted(given.work.glob("*/state.json")):
        files = [state.parent / "scores" / name for name in ("development.json", "test.json")]
        if not all(file.is_file() for file in files):
            continue
        development, test = map(_values, files)
        rng = np.random.default_rng(given.seed)
        outcomes: dict[float, list[str]] = {gain: [] for gain in (0.0, *_GAINS)}
        for repetition in range(given.calibrate):
            first, second = _swapped(development, rng), _swapped(test, rng)
            for gain, found in outcomes.items():
                found.append(_outcome(_planted(first, gain, rng), _planted(second, gain, rng), repetition))
        yield {
            "run": state.parent.name,
            "repetitions": given.calibrate,
            "better_by_planted_points": {100 * gain: found.count("better") for gain, found in outcomes.items()},
        }


def _values(path: Path) -> dict[str, Values]:
    return {name: {DISTANT: np.array(each[DISTANT], np.float64)} for name, each in read_json(path).items()}


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


def _outcome(development: dict[str, Values], test: dict[str, Values], seed: int) -> str:
    names = [name for name in development if name != "start"]
    chosen = choose(names, development, DISTANT, seed)
    return judge(test["start"], test[chosen], DISTANT, seed).outcome


if __name__ == "__main__":
    main()
