"""Adaptation of a real encoder to documents of several sources, compared with other trainings: is the verdict right?

    python -m benchmarks.adapt --start ENCODER --corpus FOLDER --stsb FOLDER --json OUT

Settings were chosen on acl-papers, rust-rfcs, swift-evolution and kubernetes-keps; python-peps, ethereum-eips and
scotus-2009-2011 were not opened for them. On finished runs (`--work`), two options measure something else:

- `--calibrate N` swaps start and candidates at random: how often does the verdict say "better" of nothing, and how
  often does it find a planted gain?
- `--queries` lets the first sentences of paragraphs search the rest, before and after. The paragraphs are those of the
  runs' test documents, at most eight of a document; nothing of them was trained on, and no choice was made by this
  measure. Intervals are over documents.
"""

import argparse
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from declutr.adaptation.candidates import CandidateBuilder
from declutr.adaptation.config import AdaptConfig, prepare_config
from declutr.adaptation.documents import held_out_documents
from declutr.adaptation.job import adapt, load_transformer
from declutr.adaptation.measures import F64, share
from declutr.adaptation.result import Result, Row
from declutr.adaptation.scores import DISTANT, HEADINGS, Values, choose, judge
from declutr.common.bootstrap import Comparison, compare, spearman
from declutr.common.storage import read_json
from declutr.encoders.protocol import unit_rows
from declutr.encoders.transformer import TransformerEncoder
from declutr.evaluation.retrieval.similarity import stsb_values

DEVELOPED_ON = ("acl-papers", "rust-rfcs", "swift-evolution", "kubernetes-keps")
UNTOUCHED = ("python-peps", "ethereum-eips", "scotus-2009-2011")
_SHUFFLED_WORDS = 40
_GAINS = (0.02, 0.03)
"""Planted gains in recall@1, of calibration."""
_MOST_PARAGRAPHS = 8
_SENTENCE_WORDS, _REST_WORDS = range(6, 41), 30


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
    parser.add_argument("--queries", action="store_true", help="sentences search their paragraphs, on finished runs")
    parser.add_argument("--work", type=Path, default=Path("runs/adapt-benchmark"), help="folder of the runs")
    options = record.parse(parser, arguments)
    if options.calibrate:
        record.publish({"calibration": list(_calibrations(options))}, options)
        return
    if options.queries:
        finished = [run for run in sorted(options.work.glob("*-seed*")) if (run / "encoder").is_dir()]
        start = load_transformer(str(options.start))
        record.publish({"runs": [_query_row(start, run, options.start) for run in finished]}, options)
        return
    if options.corpus is None:
        parser.error("--corpus is missing: give the folder with SOURCE.jsonl.gz")
    runs: list[dict[str, Any]] = []
    for source in options.sources:
        for most in (None, *(options.most_documents or ())):
            for seed in range(options.seeds if most is None else 1):
                runs += _runs(options, source, most, seed)
                record.publish({"runs": runs}, options)


def _corpus(options: argparse.Namespace, source: str, most: int | None) -> Path:
    """The documents of a source as a file."""
    path: Path = options.work / f"{source}{'' if most is None else f'-{most}'}{'-shuffled' * options.shuffled}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(options.corpus / f"{source}.jsonl.gz", "rt", encoding="utf-8") as stream:
            lines = list(islice(stream, most))
        path.write_text("".join(_shuffled(lines) if options.shuffled else lines), encoding="utf-8")
    return path


def _shuffled(lines: Sequence[str]) -> Iterator[str]:
    """The same documents as lines of JSON, each with as many passages of any documents as it had."""
    words = [json.loads(line)["text"].split() for line in lines]
    passages = [one[at : at + _SHUFFLED_WORDS] for one in words for at in range(0, len(one), _SHUFFLED_WORDS)]
    order = iter(np.random.default_rng(0).permutation(len(passages)))
    for one in words:
        count = -(-len(one) // _SHUFFLED_WORDS)
        yield json.dumps({"text": " ".join(word for place in islice(order, count) for word in passages[place])}) + "\n"


def _runs(options: argparse.Namespace, source: str, most: int | None, seed: int) -> Iterator[dict[str, Any]]:
    """One entry for each row of the table of a run."""
    corpus = _corpus(options, source, most)
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


def _differences(found: Mapping[str, Comparison], stsb: Comparison | None) -> dict[str, Any]:
    compared = {"distant": found.get(DISTANT), "queries": found.get(HEADINGS), "stsb": stsb}
    return {name: one and points(one) for name, one in compared.items()}


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
            for gain, found in outcomes.items():
                chosen_on, judged_on = _planted(first, gain, rng), _planted(second, gain, rng)
                chosen = choose([name for name in chosen_on if name != "start"], chosen_on, DISTANT, repetition)
                found.append(judge(judged_on["start"], judged_on[chosen], DISTANT, repetition).outcome)
        yield {
            "run": state.parent.name,
            "repetitions": options.calibrate,
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


def _query_row(start: TransformerEncoder, run: Path, encoder: Path) -> dict[str, Any]:
    """The difference of a run's encoder to its start, in points of recall@1."""
    source, _, seed = run.name.rpartition("-seed")
    corpus = str((run.parent / f"{source}.jsonl").absolute())
    config = prepare_config(AdaptConfig(encoder=str(encoder), corpus=[corpus]), run / "data")
    documents = held_out_documents(config, run / "data", int(seed))["test"]
    cut = [(place, *one) for place, document in enumerate(documents) for one in _paragraphs(document.text)]
    owners, queries, texts = (list(column) for column in zip(*cut, strict=True))
    before, after = (_hits(one, owners, queries, texts) for one in (start, load_transformer(str(run / "encoder"))))
    difference = compare(before, after, int(seed), share)
    row = {"source": source, "seed": int(seed), "queries": len(queries), "before": 100 * difference.before}
    return row | points(difference)


def _paragraphs(text: str) -> list[tuple[str, str]]:
    """First sentence and rest of paragraphs of a document, spread evenly."""
    found = []
    for paragraph in text.split("\n"):
        first, _, rest = re.sub(r"(?<=[a-z)][.?!])\s+", "\n", paragraph.strip(), count=1).partition("\n")
        if len(first.split()) in _SENTENCE_WORDS and len(rest.split()) >= _REST_WORDS:
            found.append((first, rest))
    places = np.linspace(0, len(found) - 1, _MOST_PARAGRAPHS).astype(int).tolist() if found else []
    return [found[place] for place in sorted(set(places))]


def _hits(encoder: TransformerEncoder, owners: list[int], queries: list[str], texts: list[str]) -> F64:
    """`(n, 2)` sentences of each document whose paragraph has the highest cosine, and sentences of it."""
    scores = unit_rows(encoder.encode(queries)) @ unit_rows(encoder.encode(texts)).T
    best = (scores >= np.diagonal(scores)[:, None]).sum(axis=1) == 1
    _, rows = np.unique(owners, return_inverse=True)
    return np.stack([np.bincount(rows, best), np.bincount(rows)], axis=1).astype(np.float64)


if __name__ == "__main__":
    main()
