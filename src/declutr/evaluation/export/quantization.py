"""Graph with weights and matrix products in 8-bit integers, for a CPU.

A linear layer y = x W + b becomes y = s t_j (q - z) V_j + b_j: q = round(x / s) + z in 0..255, with one scale s and
zero point z for a tensor; V in -127..127, with a scale t_j for a column. s and z come from the least and the largest
value of x on some texts, never from the batch, so that the embedding of a text does not depend on the texts beside it.
A table of embeddings has a scale for each row.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from declutr.encoders.onnx import session_of

_TABLE_NUMBERS = 2**20
"""Least numbers of a table of embeddings; smaller ones stay in float32."""
_DOMAIN = "com.microsoft"


def quantize(path: Path, inputs: Iterable[dict[str, NDArray[np.int64]]]) -> int:
    """Replace a graph in float32 by one in integers; return its number of linear layers.

    Args:
        path: file of the graph.
        inputs: batches of texts that decide the ranges of activations.
    """
    model = onnx.load(path)
    graph = model.graph
    values = {one.name: one for one in graph.initializer}
    layers = [node for node in graph.node if node.op_type == "MatMul" and _is_matrix(values.get(node.input[1]))]
    ranges = _ranges(model, [node.input[0] for node in layers], inputs)
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    replaced: dict[str, list[onnx.NodeProto]] = {}
    rounded: set[str] = set()
    added: set[str] = set()
    for node in layers:
        name, bias = node.input[0], _bias(node, users, values)
        integers, named = f"{name}.u8", _activation(graph, name, ranges[name])
        first = [] if name in rounded else [helper.make_node("QuantizeLinear", named, [integers])]
        rounded.add(name)
        weight, scale = _columns(graph, numpy_helper.to_array(values[node.input[1]]), node.input[1])
        names = [integers, weight, named[1], scale, named[2], "", *([bias[1]] if bias else [])]
        end = bias[0].output[0] if bias else node.output[0]
        replaced[node.output[0]] = [*first, helper.make_node("MatMulIntegerToFloat", names, [end], domain=_DOMAIN)]
        added.update([end] if bias else [])
    for node in [one for one in graph.node if one.op_type == "Gather" and _is_table(values.get(one.input[0]))]:
        replaced[node.output[0]] = _rows(graph, numpy_helper.to_array(values[node.input[0]]), node)
    nodes = [
        each for node in graph.node if node.output[0] not in added for each in replaced.get(node.output[0], [node])
    ]
    del graph.node[:]
    graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input}
    for one in [each for each in graph.initializer if each.name not in read]:
        graph.initializer.remove(one)
    model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
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
    watched.CopyFrom(model)
    distinct = list(dict.fromkeys(names))
    kept = {one.name for one in watched.graph.output}
    watched.graph.output.extend(
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in distinct if name not in kept
    )
    session = session_of(watched.SerializeToString())
    found = dict.fromkeys(distinct, (0.0, 0.0))
    for batch in inputs:
        for name, value in zip(distinct, session.run(distinct, batch), strict=True):
            found[name] = min(found[name][0], float(value.min())), max(found[name][1], float(value.max()))
    return found


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
    scale = np.float32(max((ends[1] - ends[0]) / 255, 1e-12))
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
    if name not in {one.name for one in graph.initializer}:
        graph.initializer.append(numpy_helper.from_array(value, name))
    return name
