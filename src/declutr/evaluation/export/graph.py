"""Graph of an encoder in ONNX, with its tokenizer and the settings for its use.

Inputs `input_ids` and `attention_mask`, int64 `(texts, tokens)`, padded on the right; output `sentence_embedding`,
float32 `(texts, size)`. Pooling, dense layers and normalisation are inside the graph.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.onnx.errors import OnnxExporterError

from declutr.common.console.terminal import shorten
from declutr.common.errors import EncoderError
from declutr.common.storage import hash_file, write_json
from declutr.encoders.onnx import GRAPH, SETTINGS
from declutr.encoders.transformer import TransformerEncoder

OPSETS = 23, 20
"""Opsets to try. GELU is one operation since 20, attention since 23. onnxruntime fails on the rotary
embeddings that 23 makes of ModernBERT's."""
_MOST_BYTES = 2**31
_MESSAGE_CHARACTERS = 300


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


def write_graph(encoder: TransformerEncoder, folder: Path, opset: int) -> None:
    """Write the graph, the tokenizer and the settings to an existing folder.

    Raises:
        EncoderError: the encoder is too large for one file, or has a layer that ONNX cannot express.
    """
    size = sum(4 * one.numel() for module in (encoder.encoder.model, encoder.after) for one in module.parameters())
    if size >= _MOST_BYTES:
        raise EncoderError(f"{size:,} bytes of weights; a graph in one file has less than 2 GiB")
    before = encoder.encoder.config
    encoder.encoder.set_layout(before.model_copy(update={"layout": "padded"}))
    try:
        _trace(_Graph(encoder).eval(), folder / GRAPH, encoder.device, opset)
    except OnnxExporterError as error:
        told = shorten(" ".join(str(error.__cause__ or error).split()), _MESSAGE_CHARACTERS)
        raise EncoderError(f"the exporter of torch failed ({told})") from error
    finally:
        encoder.encoder.set_layout(before)
    onnx.save(fuse(onnx.load(folder / GRAPH), encoder.encoder.model.config), folder / GRAPH)
    tokenizer, special = encoder.engine(), encoder.tokenizer
    tokenizer.enable_padding(pad_id=special.pad_token_id or 0, pad_token=special.pad_token or "[PAD]")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    settings = {
        "form": "onnx",
        "size": encoder.size,
        "max_tokens": encoder.max_tokens,
        "pooling": before.pooling,
        "prompt": encoder.prompt,
        "fingerprint": encoder.fingerprint,
        "inputs": ["input_ids", "attention_mask"],
        "output": "sentence_embedding",
        "opset": opset,
        "tokenizer": hash_file(folder / "tokenizer.json"),
    }
    write_json(folder / SETTINGS, settings)


def _trace(graph: nn.Module, path: Path, device: torch.device, opset: int) -> None:
    # Neither dimension is 1 or equals the other, because the exporter would merge them or take them for constants.
    mask = torch.ones(3, 7, dtype=torch.int64, device=device)
    mask[1, 4:] = 0
    texts, tokens = torch.export.Dim("texts"), torch.export.Dim("tokens", min=2)
    shape: dict[int, Any] = {0: texts, 1: tokens}
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the exporter warns about its internals, here and below
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                graph,
                (torch.ones_like(mask), mask),
                path,
                input_names=["input_ids", "attention_mask"],
                output_names=["sentence_embedding"],
                dynamic_shapes=(shape, shape),
                opset_version=opset,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    finally:
        logger.setLevel(level)


def fuse(model: onnx.ModelProto, config: Any) -> onnx.ModelProto:
    """Rewrite what onnxruntime computes slowly on a CPU, without another result.

    - Add before LayerNormalization becomes Sum: onnxruntime would fuse the two to SkipLayerNormalization, whose kernel
      takes several times as long as both.
    - Attention takes `(texts, tokens, hidden)`, so that nothing is transposed around it.

    Args:
        model: the graph, changed in place.
        config: of the encoder, with its number of heads.
    """
    nodes = model.graph.node
    made = {name: node for node in nodes for name in node.output}
    for node in nodes:
        if node.op_type == "LayerNormalization" and (before := made.get(node.input[0])) and before.op_type == "Add":
            before.op_type = "Sum"
    heads = getattr(config, "num_attention_heads", None)
    if not heads or getattr(config, "num_key_value_heads", heads) != heads:
        return model
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        for name in node.input:
            users.setdefault(name, []).append(node)
    for node in [one for one in nodes if one.op_type == "Attention"]:
        before = [_reshaped(name, made) for name in node.input[:3]]
        after = _only(node, "Transpose", users)
        end = _only(after, "Reshape", users) if after else None
        if after and end and all(before):
            node.input[:3] = before
            node.output[0] = end.output[0]
            node.attribute.extend(onnx.helper.make_attribute(f"{kind}_num_heads", heads) for kind in ("q", "kv"))
            nodes.remove(after)
            nodes.remove(end)
    _drop_unused(model.graph)
    return model


def _reshaped(name: str, made: dict[str, onnx.NodeProto]) -> str | None:
    """Input of the Reshape and Transpose that made a tensor; None if something else made it."""
    last = made.get(name)
    first = made.get(last.input[0]) if last and last.op_type == "Transpose" else None
    return first.input[0] if first and first.op_type == "Reshape" else None


def _only(node: onnx.NodeProto, kind: str, users: dict[str, list[onnx.NodeProto]]) -> onnx.NodeProto | None:
    """The only reader of a node's output, if it is of that kind."""
    found = users.get(node.output[0], [])
    return found[0] if len(found) == 1 and found[0].op_type == kind else None


def _drop_unused(graph: onnx.GraphProto) -> None:
    """Remove nodes and initializers that nothing reads."""
    wanted = {one.name for one in graph.output}
    for node in reversed(graph.node):  # nodes are in the order of their computation
        if wanted.intersection(node.output):
            wanted.update(node.input)
        else:
            graph.node.remove(node)
    for one in [each for each in graph.initializer if each.name not in wanted]:
        graph.initializer.remove(one)
