"""`declutr export`: an encoder as a graph or a table, measured before its folder takes its name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from declutr.common.errors import EncoderError
from declutr.common.storage import atomic_folder, read_json, write_json, write_text
from declutr.encoders.loading import load_encoder
from declutr.encoders.onnx import GRAPH, SETTINGS, padded
from declutr.encoders.protocol import SentenceEncoder, unit_rows
from declutr.encoders.static import TABLE
from declutr.encoders.transformer import TransformerEncoder
from declutr.evaluation.export.card import card
from declutr.evaluation.export.config import ExportConfig
from declutr.evaluation.export.inputs import Inputs
from declutr.evaluation.export.measure import Yardstick, measure
from declutr.evaluation.export.static import write_static
from declutr.evaluation.retrieval.similarity import general_sentences

MEASUREMENT = "measurement.json"
_TEXTS = 512
"""Most texts that are measured, and that decide the ranges of integers."""
_LEAST_COSINE = 0.9999


def export(config: ExportConfig, inputs: Inputs, facts: dict[str, Any]) -> dict[str, Any]:
    """Write the folder with its measurement and its card; return the measurement.

    Args:
        config: settings.
        inputs: their data.
        facts: hardware, versions, commit and command.

    Raises:
        EncoderError: the encoder cannot be loaded or exported.
        FileExistsError: the output exists.
    """
    encoder = load_encoder(
        config.model, device="cpu", max_tokens=config.max_tokens, trust_remote_code=config.trust_remote_code
    )
    sentences, floats = general_sentences(), dict[str, SentenceEncoder]()
    own, measured = _texts_of(config, inputs)
    texts = [*sentences, *(" ".join(sentences[start::2]) for start in (0, 1)), *own]
    measured = measured or sentences
    with atomic_folder(config.output) as aside:
        if config.to == "static":
            write_static(encoder, inputs.corpus, aside, config.vocabulary_size, config.dimensions)
        else:
            floats = _write_onnx(config, encoder, texts, aside)
        after = load_encoder(str(aside), device="cpu")
        figures: dict[str, Any] = {"name": config.to, "model": config.model, "fingerprint": encoder.fingerprint}
        figures |= {"prompt": getattr(encoder, "prompt", "")}
        figures |= {"bytes_before": _weight_bytes(encoder)}
        figures |= {"bytes": (aside / (TABLE if config.to == "static" else GRAPH)).stat().st_size}
        if inputs.told is not None:
            figures |= {"corpus": inputs.told}
        if config.to == "onnx-int8":
            figures |= {"texts_of_ranges": len(set(texts).intersection(measured))}
        yardstick = Yardstick(measured, config.stsb, inputs.test)
        figures |= measure(encoder, after, floats, yardstick) | facts
        write_json(aside / MEASUREMENT, figures)
        write_text(aside / "README.md", card(config, figures))
    return figures


def _write_onnx(
    config: ExportConfig, encoder: SentenceEncoder, texts: Sequence[str], folder: Path
) -> dict[str, SentenceEncoder]:
    """Write the graph; for integers, return the graph in float32, which they are compared with.

    Raises:
        EncoderError: the encoder is no transformer, or the graph gives other embeddings.
    """
    if not isinstance(encoder, TransformerEncoder):
        raise EncoderError(f"{encoder.name}: only transformers can be exported to ONNX; word vectors have no graph")
    from declutr.evaluation.export.graph import OPSETS, write_graph

    problems = []
    for opset in OPSETS:
        try:
            write_graph(encoder, folder, opset)
            graph = load_encoder(str(folder), device="cpu")
            first, second = (unit_rows(one.encode(texts).astype(np.float64)) for one in (encoder, graph))
        except EncoderError as error:
            problems.append(str(error))
            continue
        least = float((first * second).sum(axis=1).min())
        if least >= _LEAST_COSINE:
            break
        problems.append(f"its graph gives other embeddings (cosine {least:.4f}, at least {_LEAST_COSINE} is needed)")
    else:
        raise EncoderError(
            f"{encoder.name}: has a layer that cannot be exported to ONNX: {problems[-1]}; --to static needs no graph"
        )
    if config.to == "onnx":
        return {}
    from declutr.evaluation.export.quantization import quantize

    quantize(folder / GRAPH, (padded([row], 0) for row in encoder.windows(texts)[0] if row))
    write_json(folder / SETTINGS, read_json(folder / SETTINGS) | {"form": config.to})
    return {"onnx": graph}


def _weight_bytes(encoder: SentenceEncoder) -> int | None:
    """Bytes of a transformer's weights in float32; None for other encoders."""
    if not isinstance(encoder, TransformerEncoder):
        return None
    modules: tuple[torch.nn.Module, ...] = (encoder.encoder.model.base_model, encoder.after)
    return sum(4 * one.numel() for module in modules for one in module.parameters())


def _texts_of(config: ExportConfig, inputs: Inputs) -> tuple[list[str], list[str]]:
    """The user's texts that set the ranges of integers, and the texts that are measured.

    Integers are nearer to the encoder on the texts that set their ranges, so a corpus is divided.
    """
    if inputs.measured or config.to != "onnx-int8":
        return _spread(inputs.corpus), _spread(inputs.measured or inputs.corpus)
    ranges = _spread(inputs.corpus[::2])
    known = set(ranges)
    return ranges, _spread([text for text in inputs.corpus[1::2] if text not in known])


def _spread(texts: Sequence[str]) -> list[str]:
    """At most `_TEXTS` texts, evenly spread."""
    return list(texts[:: -(-len(texts) // _TEXTS) or 1])
