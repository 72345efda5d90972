"""The card of an export: its measurement, and how to use it."""

from pathlib import Path
from typing import Any

from declutr.evaluation.export.config import ExportConfig

_TITLES = {
    "onnx": "as a graph in ONNX",
    "onnx-int8": "as a graph in ONNX in 8-bit integers",
    "static": "as a table of token vectors",
}
_GRAPH = """    import numpy as np, onnxruntime
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file("tokenizer.json")
    rows = tokenizer.encode_batch(["A sentence.", "Another one."])
    inputs = {{"input_ids": [row.ids for row in rows], "attention_mask": [row.attention_mask for row in rows]}}
    inputs = {{name: np.array(value, np.int64) for name, value in inputs.items()}}
    embeddings = onnxruntime.InferenceSession("model.onnx").run(["sentence_embedding"], inputs)[0]

Pooling, dense layers and normalisation are inside the graph.{prompt}
"""
_INTEGERS = """
The ranges of activations are fixed, so that the embedding of a text does not depend on the texts beside it. Processors
without VNNI compute it more slowly and may round differently. The matrix products are operations of onnxruntime.
"""
_TABLE = """    from sentence_transformers import SentenceTransformer
    embeddings = SentenceTransformer("path/to/this/folder").encode(["A sentence."])
"""


def card(config: ExportConfig, figures: dict[str, Any]) -> str:
    """Text of the card.

    Args:
        config: settings of the export.
        figures: its measurement.
    """
    table = config.to == "static"
    head = "---\nlibrary_name: sentence-transformers\npipeline_tag: sentence-similarity\n---\n" if table else ""
    use = _TABLE if table else _GRAPH.format(prompt=_prompt(figures["prompt"]))
    integers = _INTEGERS if config.to == "onnx-int8" else ""
    rows = "\n".join(f"| {name} | {before} | {after} |" for name, before, after in _rows(figures))
    hardware = figures["hardware"]
    low, high = figures["speedup_range"]
    return f"""{head}# {Path(config.model).name} {_TITLES[config.to]}

{use}{integers}
## Measurement
| | encoder | export |
| --- | ---: | ---: |
{rows}

{figures["speedup"]:.2f} times as fast ({low:.2f} to {high:.2f}) as {figures["compared_with"]} in float32, on
{figures["texts"]} texts{_ranges(figures)}, in turns within one process, tokenization included.
*Hardware:* {hardware["cpu"]}, {hardware["threads"]} threads, load {hardware["load_average"]}.
`measurement.json` has all figures, versions and the command.
"""


def _prompt(prompt: str) -> str:
    return f"\nPut this prompt before every text: {prompt!r}." if prompt else ""


def _ranges(figures: dict[str, Any]) -> str:
    same = figures.get("texts_of_ranges")
    return f" ({same} of them set the ranges of the integers, which flatters the cosine)" if same else ""


def _rows(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name of a figure, and its values of encoder and export."""
    before = figures["bytes_before"]
    rows = [
        ("bytes of weights", f"{before:,}" if before else "", f"{figures['bytes']:,}"),
        ("numbers of an embedding", str(figures["size_before"]), str(figures["size"])),
    ]
    if figures["cosine"] is not None:
        rows.append(("cosine to the encoder, mean", "", f"{figures['cosine']:.4f}"))
        rows.append(("cosine to the encoder, least", "", f"{figures['cosine_least']:.4f}"))
    if "stsb_before" in figures:
        rows.append(("STS-B test, Spearman", f"{figures['stsb_before']:.2f}", f"{figures['stsb_after']:.2f}"))
    for name, one in figures.get("pairs", {}).items():
        rows.append((f"{name} of your pairs, %", f"{100 * one['before']:.1f}", f"{100 * one['after']:.1f}"))
    speeds = figures["texts_per_second"]
    rows.append(("texts a second", f"{speeds['torch']:,}", f"{speeds['export']:,}"))
    return rows
