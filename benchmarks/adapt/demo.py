"""The demo's encoders beside the closed form and lexical search, on held-out documents of the demo's own corpus.

    declutr demo
    python -m benchmarks.adapt.demo --json OUT

Differences are to the encoder that was trained with MLM alone, in points of recall@1.
"""

from pathlib import Path
from typing import Any

from benchmarks.record import facts, parser, publish
from declutr.adaptation.config import PASSAGE_TOKENS
from declutr.adaptation.documents import held_out_documents
from declutr.adaptation.job import load_transformer
from declutr.adaptation.measures import make_passages
from declutr.adaptation.scores import TestSet, Values, compared
from declutr.adaptation.whitening import WhitenConfig, whiten
from declutr.common.config import load_config
from declutr.pipeline.config import PipelineConfig

_KINDS = ("mlm_only", "declutr")


def main() -> None:
    """Run the command."""
    options = parser("adapt.demo", __doc__)
    options.add_argument("--runs", type=Path, default=Path("runs/demo"), help="the demo's runs")
    options.add_argument("--data", type=Path, default=Path("data/demo"), help="the demo's shards")
    options.add_argument("--work", type=Path, default=Path("runs/adapt-demo"), help="for the whitened encoders")
    given = options.parse_args()
    folders = {kind: given.runs / kind / "export" for kind in _KINDS}
    for kind in _KINDS:
        folders[f"{kind}, then closed form"] = _whitened(folders[kind], given.data, given.work / kind)
    encoders = {name: load_transformer(str(folder)) for name, folder in folders.items()}
    prepared = load_config("configs/demo.yaml", "prepare", PipelineConfig)
    documents = held_out_documents(prepared, given.data, given.seed)
    test = TestSet(make_passages([one for half in documents.values() for one in half], encoders["declutr"].tokenizer))
    values: dict[str, Values] = {name: test.encoder(one) for name, one in encoders.items()}
    values |= test.lexical() | {"declutr + IDF cosine": test.encoder(encoders["declutr"], with_idf=True)}
    rows = [_row(name, values["mlm_only"], each, given.seed) for name, each in values.items()]
    publish(facts("adapt.demo", given.commit) | {"documents": test.passages.num_documents, "rows": rows}, given.json)


def _whitened(encoder: Path, shards: Path, output: Path) -> Path:
    if not output.is_dir():
        settings = WhitenConfig(encoder=str(encoder), shards=str(shards), passage_tokens=PASSAGE_TOKENS)
        whiten(settings, output.absolute())
    return output


def _row(name: str, start: Values, values: Values, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {"encoder": name}
    for measure, one in compared(start, values, seed).items():
        low, high = one.interval or (float("nan"), float("nan"))
        found[measure] = {
            "value": 100 * one.after,
            "difference": 100 * one.difference,
            "low": 100 * low,
            "high": 100 * high,
        }
    return found


if __name__ == "__main__":
    main()
