"""The code path of a GPU, with kernels for the CPU: attention in one call, its guard, and compiled layers."""

import sys
from functools import partial

import cpukernel
import pytest
import torch
from measures import deviation
from messages import says
from tiny import FAMILIES, half_precision, random_spans, tiny_encoder
from torch._dynamo.testing import CompileCounter

from declutr.trainer.model.attention import Kernels, attend, attend_in_groups, kernel_problem
from declutr.trainer.model.dropout import WeightDropout, attend_in_parts, attend_with_dropout, words
from declutr.trainer.model.language_model import compile_layers, compiler_problem, parts
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.parallel.reducers import BucketedReducer

MIXED = [9, 3, 30, 12, 12, 4, 27, 9]
CPU = torch.device("cpu")
values = partial(half_precision, torch.bfloat16)
# Heads of 8 features: the guard refuses others.
WIDE = {"hidden_size": 32, "num_attention_heads": 4, "initializer_range": 0.1}


def encoder_with(kernel, family="roberta", layers=2, **settings):
    shape = WIDE | {"num_hidden_layers": layers}
    encoder = tiny_encoder(family, torch.float32, from_config=shape, **{"dropout": 0.2} | settings)
    for drops in (False, True):
        encoder._kernels[CPU, drops] = kernel and Kernels(kernel)
    return encoder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernel_computes_what_groups_compute(family):
    """With dropout of hidden states, and with ModernBERT's local layers, which pass a window."""
    batch = random_spans(MIXED, num_selected=9)
    encoders = (encoder_with(kernel, family, attention_dropout=0.0) for kernel in (attend, None))
    for one, other in zip(*(values(encoder, batch) for encoder in encoders), strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


def test_groups_attend_where_the_kernel_cannot():
    """Float32 and dropped attention weights: the same bits with and without a kernel."""
    batch = random_spans(MIXED)
    for half in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            assert torch.equal(*(encoder_with(kernel).embed(batch) for kernel in (attend, None)))


@pytest.mark.parametrize("family", FAMILIES)
def test_kernel_has_the_same_graphs_for_all_lengths(family):
    """Graphs without breaks, whatever the number of spans and tokens, and the same values as without graphs."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled, eager = (encoder_with(attend, family, attention_dropout=0.0) for _ in range(2))
    compile_layers(compiled.model.base_model, backend=counter, fullgraph=True)
    for lengths in (MIXED, [17], [3, 3, 3], [36, 3], [5] * 20):
        batch = random_spans(lengths, num_selected=2)
        for one, other in zip(values(compiled, batch), values(eager, batch), strict=True):
            assert deviation([one], [other]) < 1e-6
    assert counter.frame_count == (3 if family == "modernbert" else 2)  # of embeddings and of each kind of layer


@pytest.mark.parametrize(
    ("capability", "head_size", "reason"),
    [
        ((9, 0), 64, None),
        ((8, 0), 256, None),
        ((7, 5), 64, "compute capability 7.5"),
        ((9, 0), 20, ("head size", "20")),
        ((9, 0), 264, ("head size", "264")),
    ],
)
def test_kernel_problem_names_capability_or_head_size(capability, head_size, reason):
    problem = kernel_problem(capability, head_size)
    if reason is None:
        assert problem is None
    else:
        says(problem, reason)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("most_weights", [1, 200, 2**26])
def test_attention_weights_of_some_spans_at_a_time_are_those_of_all(masked, most_weights):
    """The same bits, values and gradients, as with the weights of all spans."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, 2, 7, 4, generator=generator).requires_grad_() for _ in range(3))
    mask = (torch.rand(5, 1, 1, 7, generator=generator) < 0.8) | (torch.arange(7) == 0) if masked else None
    keys = words(1, 35, CPU).view(5, 7)
    drop = WeightDropout(torch.tensor(3), 0.3, keys)
    found = []
    for explicit, more in ((attend_with_dropout, {}), (attend_in_parts, {"most_weights": most_weights})):
        out = explicit(query, key, value, mask, None, drop, **more)
        found.append([out, *torch.autograd.grad(out.square().sum(), (query, key, value))])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_compiler_problem_names_what_a_machine_lacks(monkeypatch, tmp_path):
    """A compiler under any of its names, and Python's headers, where this Python would have them."""
    headers = tmp_path / "include"
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(headers)})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    says(compiler_problem(), "gcc, clang", "install gcc", "CC")
    (tmp_path / "cc").touch(mode=0o755)
    assert "no C compiler" in compiler_problem(), "Triton does not look for cc"
    (tmp_path / "clang").touch(mode=0o755)
    says(compiler_problem(), headers / "Python.h", "missing", "python3-dev")
    headers.mkdir()
    (headers / "Python.h").touch()
    assert compiler_problem() is None
    monkeypatch.setenv("CC", "icc")
    says(compiler_problem(), "icc")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "triton is missing" in compiler_problem()


def test_groups_are_kept_out_of_graphs():
    assert attend_in_groups._torchdynamo_disable


LAYERS = 9  # torch makes at most 8 graphs of a function, unless more are allowed


class Noting(BucketedReducer):
    """Notes how many layers' backwards have run when a bucket is complete, and sends nothing."""

    def _send(self, bucket):
        self.notes.append(len(cpukernel.BACKWARDS))
        bucket.sent = bucket.flat


def layers_done(encoder):
    """For each bucket of the encoder's parameters, the layers whose backward has run when it is sent."""
    reducer = Noting(Communicator(), list(encoder.model.base_model.parameters()), bucket_bytes=2**12)
    reducer.notes = []
    for _ in range(2):
        cpukernel.BACKWARDS.clear()
        reducer.notes.clear()
        reducer.begin()
        reducer.arm()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = encoder.hidden(random_spans(MIXED))
        hidden.square().sum().backward()
    assert len(cpukernel.BACKWARDS) == encoder.model.config.num_hidden_layers
    assert len(reducer.notes) == len(reducer.buckets) > len(cpukernel.BACKWARDS)
    return reducer.notes


@pytest.mark.nightly
def test_compile_layers_while_the_backward_runs_sends_buckets():
    """As without compilation; in one graph of the whole encoder, all would be sent after the last layer."""
    torch._dynamo.reset()
    eager, compiled, whole = (encoder_with(attend, layers=layers, attention_dropout=0.0) for layers in (4, 4, 2))
    compile_layers(compiled.model.base_model, backend="aot_eager")
    whole.model.base_model.compile(backend="aot_eager", dynamic=True)
    expected, found = layers_done(eager), layers_done(compiled)
    assert found[0] == 1
    assert max(one - other for one, other in zip(found, expected, strict=True)) <= 1
    assert set(layers_done(whole)) == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("roberta", "kernel"),
        ("roberta", "groups"),
        pytest.param("roberta", "padded", marks=pytest.mark.nightly),
        ("modernbert", "kernel"),
    ],
)
def test_compile_layers_of_any_number_of_layers_makes_the_same_graphs(family, layout):
    """With dropped attention weights, whose masks depend on the layer's number; gradients are those without graphs."""
    kernel, rate = (attend, 0.0) if layout == "kernel" else (None, 0.2)
    settings = {"attention_dropout": rate, "layout": "padded" if layout == "padded" else "packed"}
    graphs = []
    for layers in (4 if family == "modernbert" else 2, LAYERS):  # two of each kind, and more than torch's graphs
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled, eager = (encoder_with(kernel, family, layers, **settings) for _ in range(2))
        compile_layers(compiled.model.base_model, backend=counter)
        for number, lengths in enumerate((MIXED, [17, 3])):
            batch = random_spans(lengths, num_selected=2, seed=number)
            assert deviation(values(compiled, batch)[1:], values(eager, batch)[1:]) < 1e-6
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1] > 1


def test_parts_of_an_encoder_are_its_embeddings_and_layers():
    body = encoder_with(attend, layers=LAYERS).model.base_model
    assert list(parts(body)) == [body.embeddings, *body.encoder.layer]
    assert list(parts(body.embeddings)) == [body.embeddings]
    modernbert = encoder_with(attend, "modernbert", LAYERS).model.base_model  # torch compiles no single norm
    assert list(parts(modernbert)) == [modernbert.embeddings, *modernbert.layers]
