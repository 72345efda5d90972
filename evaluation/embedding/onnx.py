"""Export of an encoder to ONNX: a folder with `model.onnx`, its `tokenizer.json`, and the settings for their use.

Inputs `input_ids` and `attention_mask`, int64 `(texts, tokens)`, padded on the right; output `sentence_embedding`,
float32 `(texts, size)`. Pooling, dense layers and normalisation are inside the graph.
"""

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from declutr.common.storage import atomic_folder, write_json
from declutr.evaluation.encoders.protocol import EncoderError, SentenceEncoder
from declutr.evaluation.encoders.transformer import TransformerEncoder

OPSET = 18
SETTINGS = "declutr_onnx.json"


def require_onnx() -> None:
    """Check, before an encoder is loaded, that the libraries for writing a graph are installed.

    Raises:
        EncoderError: a library is missing.
    """
    for name in ("onnx", "onnxscript"):
        try:
            import_module(name)
        except ImportError as error:
            raise EncoderError(
                f"export-onnx needs the package {name} (pip install onnx onnxscript): {error}"
            ) from error


class _Graph(nn.Module):
    """Map padded ids to embeddings, in operations that ONNX supports."""

    def __init__(self, encoder: TransformerEncoder) -> None:
        super().__init__()
        self.base = encoder.encoder.model.base_model
        self.after = encoder.after
        self.pooling = encoder.encoder.config.pooling

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden: Tensor = self.base(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[:, :, None].to(hidden.dtype)
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        elif self.pooling == "max":
            pooled = (hidden + (1 - mask) * torch.finfo(hidden.dtype).min).amax(dim=1)
        else:
            if self.pooling == "mean_without_cls":
                hidden, mask = hidden[:, 1:], mask[:, 1:]
            pooled = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp_min(1)
        embedding: Tensor = self.after(pooled)
        return embedding


def export_onnx(encoder: SentenceEncoder, output: Path) -> None:
    """Write the folder.

    Raises:
        EncoderError: the encoder is not a transformer, or reads long texts in windows, which a graph cannot do.
        FileExistsError: `output` exists.
    """
    if not isinstance(encoder, TransformerEncoder):
        raise EncoderError(f"{encoder.name}: only transformers can be exported to ONNX")
    if encoder.long_texts != "cut":
        raise EncoderError(
            "--long-texts windows cannot be exported; export with cut and average windows outside the graph"
        )
    before = encoder.encoder.config
    encoder.encoder.set_layout(before.model_copy(update={"layout": "padded"}))
    try:
        with atomic_folder(output) as aside:
            _write_graph(_Graph(encoder).eval(), aside / "model.onnx", encoder.device)
            (aside / "tokenizer.json").write_text(_tokenizer(encoder), encoding="utf-8")
            settings = {
                "size": encoder.size,
                "max_tokens": encoder.max_tokens,
                "pooling": before.pooling,
                "prompt": encoder.prompt,
                "fingerprint": encoder.fingerprint,
                "inputs": ["input_ids", "attention_mask"],
                "output": "sentence_embedding",
                "opset": OPSET,
            }
            write_json(aside / SETTINGS, settings)
    finally:
        encoder.encoder.set_layout(before)


def _write_graph(graph: nn.Module, path: Path, device: torch.device) -> None:
    # Neither dimension is 1 or equals the other, because the exporter would merge them or take them for constants.
    mask = torch.ones(3, 7, dtype=torch.int64, device=device)
    mask[1, 4:] = 0
    texts, tokens = torch.export.Dim("texts"), torch.export.Dim("tokens", min=2)
    shape: dict[int, Any] = {0: texts, 1: tokens}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter warns about its internals
        torch.onnx.export(
            graph,
            (torch.ones_like(mask), mask),
            path,
            input_names=["input_ids", "attention_mask"],
            output_names=["sentence_embedding"],
            dynamic_shapes=(shape, shape),
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def _tokenizer(encoder: TransformerEncoder) -> str:
    """Tokenizer with truncation and padding set, so that `tokenizers` alone prepares the graph's inputs."""
    tokenizer = encoder.engine()
    special = encoder.tokenizer
    tokenizer.enable_padding(pad_id=special.pad_token_id or 0, pad_token=special.pad_token or "[PAD]")
    text: str = tokenizer.to_str(pretty=True)
    return text
