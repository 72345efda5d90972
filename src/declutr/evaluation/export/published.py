"""The graph of an encoder that is published beside it: its files, and what the encoder's card says of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from declutr.common.storage import read_json
from declutr.evaluation.export.config import ExportError

_FILES = ("model.onnx", "tokenizer.json", "declutr_onnx.json")
_USE = """
With onnxruntime, from `onnx/`:

    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer
    rows = Tokenizer.from_file("onnx/tokenizer.json").encode_batch(["A sentence."])
    given = {"input_ids": [row.ids for row in rows], "attention_mask": [row.attention_mask for row in rows]}
    given = {name: np.array(value, np.int64) for name, value in given.items()}
    embeddings = onnxruntime.InferenceSession("onnx/model.onnx").run(["sentence_embedding"], given)[0]
"""
_MEASUREMENT = "measurement.json"


def published_graph(folder: Path) -> tuple[dict[str, Path], str]:
    """Files of the ONNX export in or next to the folder of its encoder, and lines for the card; empty without one.

    Raises:
        ExportError: it is of another encoder, or does not name its form.
    """
    place = next((one for one in (folder / "onnx", folder.parent / "onnx") if (one / "model.onnx").is_file()), None)
    if place is None:
        return {}, ""
    from declutr.encoders.loading import load_encoder  # loads torch

    settings: dict[str, Any] = read_json(place / _FILES[-1]) if (place / _FILES[-1]).is_file() else {}
    encoder = load_encoder(folder, device="cpu", max_tokens=settings.get("max_tokens"))
    if settings.get("fingerprint") != encoder.fingerprint:
        raise ExportError(f"{place}: was exported from another encoder than {folder}; export it again, or remove it")
    files = {f"onnx/{name}": place / name for name in _FILES if (place / name).is_file()}
    return files, _USE + "".join(_about(place, settings))


def _about(place: Path, settings: dict[str, Any]) -> Iterator[str]:
    """Sentences on the graph of an export, each with a line of its own: its prompt, and how its numbers differ.

    Raises:
        ExportError: neither its settings nor its measurement name its form.
    """
    found: dict[str, Any] = read_json(place / _MEASUREMENT) if (place / _MEASUREMENT).is_file() else {}
    if found.get("fingerprint") != settings["fingerprint"]:
        found = {}
    if (form := settings.get("form", found.get("name"))) is None:
        raise ExportError(f"{place}: does not say if its graph is in 8-bit integers; export it again, or remove it")
    if prompt := settings.get("prompt"):
        yield f"\nPut this prompt before every text: {prompt!r}.\n"
    if form == "onnx-int8":
        yield "\nThis graph computes in 8-bit integers; the scores below are those of the encoder in float32.\n"
        if not found:
            yield "How much its embeddings differ was not measured.\n"
        else:
            yield f"On {found['texts']} texts the cosine of its embeddings to those of the encoder is "
            yield f"{found['cosine']:.4f} on average, {found['cosine_least']:.4f} at least.\n"
        if found.get("texts_of_ranges"):
            yield f"{found['texts_of_ranges']} of these texts set its ranges, which flatters the cosine.\n"
        if "stsb_after" in found:
            yield f"STS-B test, Spearman: encoder {found['stsb_before']:.2f}, graph {found['stsb_after']:.2f}.\n"
