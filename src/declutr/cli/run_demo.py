"""`declutr demo`: a corpus found on every machine, three encoders, one table of scores."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from declutr.common.config import load_config
from declutr.common.console.terminal import shorten
from declutr.common.paths import expand
from declutr.common.storage import write_json
from declutr.encoders.loading import load_encoder
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.job.outcome import summary
from declutr.pipeline.prepare import prepare
from declutr.pipeline.shards.manifest import TOKENIZER
from declutr.pipeline.shards.shards import ShardSet, ragged
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.train import train

COLUMNS = (
    *("recall_at_1", "mrr", "distant_recall_at_1", "distant_mrr"),
    *("alignment", "uniformity", "effective_rank", "seconds"),
)
_EXAMPLES, _NEIGHBOURS, _PASSAGE_TOKENS, _POOL, _SHOWN_CHARACTERS = 4, 2, 48, 400, 100


def demo(config: str, overrides: list[str]) -> Iterator[str]:
    """Prepare, train with MLM only and with DeCLUTR, compare; yield the lines of output.

    Writes `summary.json` next to the two runs: for `untrained`, `mlm_only`, `declutr` the held-out scores and the
    seconds of training.
    """
    started = time.monotonic()
    data = load_config(config, "prepare", PipelineConfig)
    yield summary(prepare(data), data.output)
    prepared = time.monotonic()
    settings = load_config(config, "train", TrainConfig, overrides)
    folder = expand(settings.run).parent
    mlm = settings.model_copy(
        update={"run": str(folder / "mlm_only"), "objective": settings.objective.model_copy(update={"terms": "mlm"})}
    )
    results = {"mlm_only": train(mlm), "declutr": train(settings)}
    rows: dict[str, dict[str, float]] = {
        "untrained": {**results["declutr"]["first_scores"], "seconds": 0.0},
        **{name: {**result["last_scores"], "seconds": result["seconds"]} for name, result in results.items()},
    }
    write_json(folder / "summary.json", rows)
    yield ""
    yield from table(rows)
    yield ""
    yield from neighbours(expand(settings.places[0]), Path(results["declutr"]["export"]))
    yield ""
    yield f"prepared in {prepared - started:.0f} s, total {time.monotonic() - started:.0f} s; {folder}/summary.json"
    yield f"the encoder: SentenceTransformer({str(results['declutr']['export'])!r})"


def table(rows: dict[str, dict[str, float]]) -> Iterator[str]:
    """Format the scores as a text table; `rows` by encoder, then by column."""
    widths = {name: max(len(name), 8) + 2 for name in COLUMNS}
    yield f"{'held-out documents':18s}" + "".join(f"{name:>{width}s}" for name, width in widths.items())
    for name, scores in rows.items():
        yield f"{name:18s}" + "".join(f"{scores[column]:>{width}.3f}" for column, width in widths.items())


def neighbours(data: Path, model: Path) -> Iterator[str]:
    """A few held-out passages with the nearest passages of other documents."""
    shards = ShardSet(data, "held-out")
    rows: dict[str, Any] = {}
    documents = shards.take(np.arange(min(_POOL, shards.num_documents)))
    tokens, offsets = ragged(documents.column("tokens"))
    tokenizer = AutoTokenizer.from_pretrained(data / TOKENIZER, trust_remote_code=False)
    sources = documents.column("source").to_pylist()
    for number, source in enumerate(sources):
        passage = tokens[offsets[number] : offsets[number + 1]][:_PASSAGE_TOKENS]
        rows.setdefault(tokenizer.decode(passage.tolist()).strip(), source)
    texts = list(rows)
    embeddings = F.normalize(torch.from_numpy(load_encoder(str(model)).encode(texts)), dim=-1)
    scores = (embeddings @ embeddings.T).fill_diagonal_(-1)
    yield "nearest neighbours among the openings of held-out documents"
    for query in np.linspace(0, len(texts) - 1, _EXAMPLES).astype(int).tolist():
        yield f"- {rows[texts[query]]}: {shorten(texts[query], _SHOWN_CHARACTERS)}"
        best = scores[query].topk(min(_NEIGHBOURS, len(texts) - 1))
        for value, other in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            yield f"    {value:.2f}  {rows[texts[other]]}: {shorten(texts[other], _SHOWN_CHARACTERS)}"
