"""Graph of an encoder in ONNX, with its tokenizer and the settings for its use.

Inputs `input_ids` and `attention_mask`, int64 `(texts, tokens)`, padded on the right; output `sentence_embedding`,
float32 `(texts, size)`. Pooling, dense layers and normalisation are inside the graph.

In 8-bit integers, for a CPU, a linear layer y = x W + b becomes y = s t_j (q - z) V_j + b_j: q = round(x / s) + z in
0..255, with one scale s and zero point z for a tensor; V in -127..127, with a scale t_j for a column. s and z come from
the least and the largest value of x on some texts. A table of embeddings has a scale for each row.
"""

import logging
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from torch import Tensor, nn
from torch.onnx.errors import OnnxExporterError

from declutr.common.console.terminal import shorten
from declutr.common.errors import EncoderError
from declutr.common.storage import hash_file, write_json
from declutr.encoders.exported import GRAPH, SETTINGS, session_of
from declutr.encoders.transformer import TransformerEncoder

OPSETS = 23, 20
"""Opsets to try. GELU is one operation since 20, attention since 23. onnxruntime fails on the rotary
embeddings that 23 makes of ModernBERT's."""
_MOST_BYTES = 2**31  # the limit of protobuf
_MESSAGE_CHARACTERS = 300
_TABLE_NUMBERS = 2**20  # least numbers of a table of embeddings in integers; smaller ones stay in float32
_DOMAIN = "com.microsoft"  # ONNX itself has no product of integers with scales and a bias


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
            pooled = (hidden + (1 - mask) * torch.finfo(hidden.dtype).min).amax(dim=1)  # not -inf, which times 0 is NaN
        else:
            if self.pooling == "mean_without_cls":
                hidden, mask = hidden[:, 1:], mask[:, 1:]
            pooled = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp_min(1)
        return self.after(pooled)


def write_graph(encoder: TransformerEncoder, folder: Path, opset: int) -> None:
    """Write the graph, the tokenizer and the settings to an existing folder."""
    if not encoder.pools_prompt:
        raise EncoderError(f"{encoder.name}: leaves its prompt out of the pooling, which a graph cannot")
    size = sum(4 * p.numel() for module in (encoder.encoder.model, encoder.after) for p in module.parameters())
    if size >= _MOST_BYTES:
        raise EncoderError(f"{size:,} bytes of weights; a graph in one file has less than 2 GiB")
    before = encoder.encoder.config
    encoder.encoder.set_layout(before.model_copy(update={"layout": "padded"}))
    try:
        _trace(_Graph(encoder).eval(), folder / GRAPH, encoder.device, opset)
    except OnnxExporterError as error:
        cause = shorten(" ".join(str(error.__cause__ or error).split()), _MESSAGE_CHARACTERS)
        raise EncoderError(f"the exporter of torch failed ({cause})") from error
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
        "prompts": encoder.prompts,
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
                external_data=False,  # an export is one file
                verbose=False,
            )
    finally:
        logger.setLevel(level)


def fuse(model: onnx.ModelProto, config: Any) -> onnx.ModelProto:
    """Rewrite what onnxruntime computes slowly on a CPU, without another result.

    The graph is changed in place: Add before LayerNormalization becomes Sum, and attention takes
    `(texts, tokens, hidden)`. `config` is the encoder's, with its number of heads.
    """
    nodes = model.graph.node
    producers = {name: node for node in nodes for name in node.output}
    for node in nodes:
        added = producers.get(node.input[0]) if node.op_type == "LayerNormalization" else None
        if added and added.op_type == "Add":
            # onnxruntime would fuse Add to SkipLayerNormalization, whose kernel takes two to six times as long as both.
            added.op_type = "Sum"
    heads = getattr(config, "num_attention_heads", None)
    if not heads or getattr(config, "num_key_value_heads", heads) != heads:  # below, both have one number
        return model
    users = _users(model.graph)
    for node in [item for item in nodes if item.op_type == "Attention"]:  # a list, because nodes are removed
        before = [_reshaped(name, producers) for name in node.input[:3]]
        after = _only(node, "Transpose", users)
        end = _only(after, "Reshape", users) if after else None
        if after and end and all(before):  # so that nothing is transposed around it
            node.input[:3] = before
            node.output[0] = end.output[0]
            node.attribute.extend(helper.make_attribute(f"{kind}_num_heads", heads) for kind in ("q", "kv"))
            nodes.remove(after)
            nodes.remove(end)
    _drop_unused(model.graph)
    return model


def _users(graph: onnx.GraphProto) -> dict[str, list[onnx.NodeProto]]:
    """The nodes that read a tensor, by its name."""
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    return users


def _reshaped(name: str, producers: dict[str, onnx.NodeProto]) -> str | None:
    """Input of the Reshape and Transpose that made a tensor; None if something else made it."""
    last = producers.get(name)
    first = producers.get(last.input[0]) if last and last.op_type == "Transpose" else None
    return first.input[0] if first and first.op_type == "Reshape" else None


def _only(node: onnx.NodeProto, kind: str, users: dict[str, list[onnx.NodeProto]]) -> onnx.NodeProto | None:
    """The only reader of a node's output, if it is of that kind."""
    readers = users.get(node.output[0], [])
    return readers[0] if len(readers) == 1 and readers[0].op_type == kind else None


def _drop_unused(graph: onnx.GraphProto) -> None:
    """Remove nodes and initializers that nothing reads."""
    needed = {output.name for output in graph.output}
    for node in reversed(graph.node):  # nodes are in the order of their computation
        if needed.intersection(node.output):
            needed.update(node.input)
        else:
            graph.node.remove(node)
    for unused in [tensor for tensor in graph.initializer if tensor.name not in needed]:
        graph.initializer.remove(unused)


def quantize(path: Path, inputs: Iterable[dict[str, NDArray[np.int64]]]) -> int:
    """Replace a float32 graph by one in integers, its ranges from `inputs`; return its number of linear layers."""
    model = onnx.load(path)
    graph = model.graph
    values = {tensor.name: tensor for tensor in graph.initializer}
    layers = [node for node in graph.node if node.op_type == "MatMul" and _is_matrix(values.get(node.input[1]))]
    ranges = _ranges(model, [node.input[0] for node in layers], inputs)
    users = _users(graph)
    replaced: dict[str, list[onnx.NodeProto]] = {}
    rounded: set[str] = set()
    added: set[str] = set()
    for node in layers:
        name, bias = node.input[0], _bias(node, users, values)
        # Fixed ranges: of a batch's own, the embedding of a text would depend on the texts beside it.
        integers, activation = f"{name}.u8", _activation(graph, name, ranges[name])
        first = [] if name in rounded else [helper.make_node("QuantizeLinear", activation, [integers])]
        rounded.add(name)
        weight, scale = _columns(graph, numpy_helper.to_array(values[node.input[1]]), node.input[1])
        names = [integers, weight, activation[1], scale, activation[2], "", *([bias[1]] if bias else [])]
        end = bias[0].output[0] if bias else node.output[0]
        # With the bias, which onnxruntime's quantizer leaves outside, where its kernel takes twice as long.
        replaced[node.output[0]] = [*first, helper.make_node("MatMulIntegerToFloat", names, [end], domain=_DOMAIN)]
        added.update([end] if bias else [])
    for node in [item for item in graph.node if item.op_type == "Gather" and _is_table(values.get(item.input[0]))]:
        replaced[node.output[0]] = _rows(graph, numpy_helper.to_array(values[node.input[0]]), node)
    nodes = [
        new_node
        for node in graph.node
        if node.output[0] not in added
        for new_node in replaced.get(node.output[0], [node])
    ]
    del graph.node[:]  # protobuf refuses to assign to a repeated field
    graph.node.extend(nodes)
    _drop_unused(graph)
    model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))  # an ONNX model lists each set of operators that it uses
    onnx.save(model, path)
    return len(layers)


def _is_matrix(value: onnx.TensorProto | None) -> bool:
    return value is not None and len(value.dims) == 2 and value.data_type == onnx.TensorProto.FLOAT


def _is_table(value: onnx.TensorProto | None) -> bool:
    return value is not None and _is_matrix(value) and value.dims[0] * value.dims[1] >= _TABLE_NUMBERS


def _ranges(
    model: onnx.ModelProto, names: list[str], inputs: Iterable[dict[str, NDArray[np.int64]]]
) -> dict[str, tuple[float, float]]:
    """Least and largest value of each tensor, 0 included."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)  # a copy: the export has one output
    distinct = list(dict.fromkeys(names))  # queries, keys and values read one tensor
    kept = {output.name for output in watched.graph.output}
    watched.graph.output.extend(
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in distinct if name not in kept
    )
    session = session_of(watched.SerializeToString())
    ranges = dict.fromkeys(distinct, (0.0, 0.0))  # with 0, which is an integer of its own, the zero point
    for batch in inputs:
        for name, value in zip(distinct, session.run(distinct, batch), strict=True):
            ranges[name] = min(ranges[name][0], float(value.min())), max(ranges[name][1], float(value.max()))
    return ranges


def _bias(
    node: onnx.NodeProto, users: dict[str, list[onnx.NodeProto]], values: dict[str, onnx.TensorProto]
) -> tuple[onnx.NodeProto, str] | None:
    """The only reader of a matrix product, if it adds a constant row, and the name of that row."""
    readers = users.get(node.output[0], [])
    if len(readers) != 1 or readers[0].op_type != "Add":
        return None
    other = next(name for name in readers[0].input if name != node.output[0])
    return (readers[0], other) if other in values and len(values[other].dims) == 1 else None


def _activation(graph: onnx.GraphProto, name: str, ends: tuple[float, float]) -> list[str]:
    """Names of a tensor, its scale and its zero point."""
    scale = np.float32(max((ends[1] - ends[0]) / 255, 1e-12))  # an input of zeros has no range
    zero = np.uint8(np.clip(np.rint(-ends[0] / scale), 0, 255))
    return [name, _constant(graph, f"{name}.scale", np.array(scale)), _constant(graph, f"{name}.zero", np.array(zero))]


def _columns(graph: onnx.GraphProto, matrix: NDArray[np.float32], name: str) -> tuple[str, str]:
    """Names of the integers of a matrix and of the scales of its columns."""
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-12) / 127
    return (
        _constant(graph, f"{name}.s8", np.rint(matrix / scale).astype(np.int8)),
        _constant(graph, f"{name}.scale", scale.astype(np.float32)),
    )


def _rows(graph: onnx.GraphProto, table: NDArray[np.float32], node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Nodes that look up rows of integers and scale them."""
    scale = np.maximum(np.abs(table).max(axis=1, keepdims=True), 1e-12) / 127
    name, ids, end = node.input[0], node.input[1], node.output[0]
    integers = _constant(graph, f"{name}.s8", np.rint(table / scale).astype(np.int8))
    scales = _constant(graph, f"{name}.scale", scale.astype(np.float32))
    return [
        helper.make_node("Gather", [integers, ids], [f"{end}.s8"]),
        helper.make_node("Gather", [scales, ids], [f"{end}.scale"]),
        helper.make_node("Cast", [f"{end}.s8"], [f"{end}.f32"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", [f"{end}.f32", f"{end}.scale"], [end]),
    ]


def _constant(graph: onnx.GraphProto, name: str, value: NDArray[Any]) -> str:
    """Name of a constant, added if it is new."""
    if name not in {tensor.name for tensor in graph.initializer}:
        graph.initializer.append(numpy_helper.from_array(value, name))
    return name
