"""`declutr demo`: an encoder from a corpus that every machine has, a verdict against random weights, five searches."""

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from declutr.cli import Parser
from declutr.common.console.logs import setup_logging
from declutr.common.errors import UsageError
from declutr.common.paths import expand

if TYPE_CHECKING:
    from declutr.adaptation.scores import Values, Verdict
    from declutr.encoders.transformer import TransformerEncoder

QUERIES = (
    "sort a list by a key",
    "read the lines of a text file",
    "draw random numbers from a normal distribution",
    "wait for a process to finish",
    "invert a matrix",
)
_SHOWN_CHARACTERS = 100


def run_demo(arguments: list[str]) -> int:
    """Prepare a corpus found on every machine, train an encoder, compare it with one of random weights; return 0.

    Writes `summary.json` beside the run: by encoder or baseline, recall@1 of distant passages, and the verdict.
    """
    parser = Parser("demo", "Prepare a corpus, train an encoder, measure it, search with it.")
    parser.shared("overrides")
    parser.add_argument("--config", default="configs/demo.yaml")
    options = parser.parse_intermixed_args(arguments)
    from declutr.common.config import load_config
    from declutr.pipeline.config import PipelineConfig
    from declutr.pipeline.config import look as look_for_data
    from declutr.trainer.config import TrainConfig
    from declutr.trainer.driver.checks import run_problem

    # before the corpus is prepared, and before torch is loaded
    data = load_config(options.config, "prepare", PipelineConfig, (), look_for_data)
    settings = load_config(options.config, "train", TrainConfig, options.overrides)
    if settings.data != data.output:
        raise UsageError(f"data = {settings.data}: the demo trains on what it prepares; `declutr train` takes others")
    if settings.export != "last":
        raise UsageError(
            f"export = {settings.export}: the demo judges on rows that would choose; `declutr train` takes it"
        )
    if problem := run_problem(settings.run):
        raise UsageError(f"run = {settings.run}: {problem}")
    from declutr.common.storage import write_json
    from declutr.pipeline.job.outcome import summary
    from declutr.pipeline.prepare import prepare
    from declutr.trainer.train import train

    setup_logging("demo")
    started, folder = time.monotonic(), expand(settings.run).parent
    print(summary(prepare(data), data.output), flush=True)
    export = train(settings)["export"]
    from declutr.adaptation.candidates import load_transformer

    shards, encoder = Path(data.output), load_transformer(export)
    rows, verdict = _compared(shards, encoder, load_transformer(f"untrained:{export}"), settings.seed)
    facts = {"outcome": verdict.outcome, "documents": verdict.comparison.rows, "interval": verdict.comparison.interval}
    write_json(folder / "summary.json", rows | {"verdict": facts, "seconds": round(time.monotonic() - started)})
    print("\nrecall@1: a passage of a held-out document searches another one of it, 96 tokens away or more, among one "
          "passage of each")  # fmt: skip
    print(*(f"{name:14s}{100 * score:5.1f}" for name, score in rows.items()), sep="\n")
    print(verdict.sentence("documents"), flush=True)
    print(*_searches(shards, encoder), "", sep="\n")
    print(f"{time.monotonic() - started:.0f} s in all; {folder}/summary.json")
    print(f"the encoder: declutr.load({str(export)!r})", flush=True)
    return 0


def _compared(
    data: Path, encoder: "TransformerEncoder", untrained: "TransformerEncoder", seed: int
) -> "tuple[dict[str, float], Verdict]":
    """Scores of both encoders and of words on held-out documents, and the verdict."""
    from declutr.adaptation.config import LENGTHS, Lengths
    from declutr.adaptation.passages import make_passages
    from declutr.adaptation.scores import DISTANT, STATISTICS, TestSet, judge
    from declutr.evaluation.retrieval.compare import BM25, IDF

    texts = [text for _, text in _documents(data, "held-out", encoder.tokenizer)]
    longest = encoder.max_tokens - encoder.tokenizer.num_special_tokens_to_add()  # of --config, which may be short
    test = TestSet(make_passages(texts, encoder.tokenizer, lengths=Lengths(min(LENGTHS.passage, longest))))
    words = test.lexical()
    values: dict[str, Values] = {
        "untrained": test.encoder(untrained),
        "trained": test.encoder(encoder),
        "BM25": words[BM25],
        "IDF cosine": words[IDF],
        "trained + IDF": test.encoder(encoder, 1.0),
    }
    return (
        {name: STATISTICS[DISTANT](row[DISTANT][test.passages.scorable]) for name, row in values.items()},
        judge(values["untrained"], values["trained"], DISTANT, seed),
    )


def _searches(data: Path, encoder: "TransformerEncoder") -> Iterator[str]:
    """The nearest beginning of a document to each of five queries, for the eye."""
    from declutr.encoders.protocol import unit_rows

    documents = [row for split in ("train", "held-out") for row in _documents(data, split, encoder.tokenizer, 62)]
    vectors = unit_rows(encoder.encode([text for _, text in documents]))
    yield f"\nfive searches of the beginnings of {len(documents):,} documents"
    for query, row in zip(QUERIES, (unit_rows(encoder.encode(QUERIES)) @ vectors.T).argmax(axis=1), strict=True):
        source, text = documents[row]
        yield f"  {query}\n    {source}: {text[:_SHOWN_CHARACTERS]}"


def _documents(data: Path, split: str, tokenizer: Any, most_tokens: int | None = None) -> Sequence[tuple[str, str]]:
    """Source and text of each document of a split, or the beginning of its text."""
    import numpy as np

    from declutr.pipeline.shards.shards import ShardSet, ragged

    shards = ShardSet(data, split)
    rows = shards.take(np.arange(shards.num_documents))
    tokens, offsets = ragged(rows.column("tokens"))
    ids = [tokens[start:end][:most_tokens].tolist() for start, end in pairwise(offsets.tolist())]
    return list(zip(rows.column("source").to_pylist(), tokenizer.batch_decode(ids), strict=True))
