"""The code path of a GPU on the CPU: attention in one call, its guard, compiled layers, Triton's interpreter."""

import importlib
import subprocess
import sys
from functools import partial
from itertools import accumulate, pairwise
from unittest.mock import Mock

import cpukernel
import pytest
import torch
import torch.nn.functional as F
from measures import deviation
from messages import says
from processes import run_python
from tiny import FAMILIES, half_precision, random_spans, tiny_encoder
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.nn.attention import varlen

from declutr.trainer.data.packedbatch import TokenRates
from declutr.trainer.model.attention import AttentionLayout, Kernels, attend, attend_in_groups, kernel_problem
from declutr.trainer.model.dropout import WeightDropout, attend_in_parts, attend_with_dropout, words
from declutr.trainer.model.encoder import mlm_head
from declutr.trainer.model.language_model import compile_layers, compiler_problem, pad_vocabulary, parts
from declutr.trainer.parallel.reducers import BucketedReducer

MIXED = [9, 3, 30, 12, 12, 4, 27, 9]
CPU = torch.device("cpu")
DAILY = [(3, True, 7), (1, False, None), (1, None, None)]  # heads, mixed rates, window: each of these takes ten seconds
values = partial(half_precision, torch.bfloat16)
in_float16 = partial(half_precision, torch.float16)  # the interpreter has no products in bfloat16
pytest.importorskip("triton", reason="Triton is not installed")
span_attention = importlib.import_module("declutr.trainer.model.span_attention")
# Heads of 8 features: the guard refuses others.
WIDE = {"hidden_size": 32, "num_attention_heads": 4, "initializer_range": 0.1}


def encoder_with(kernel, family="roberta", layers=2, shape=(), **settings):
    shape = WIDE | {"num_hidden_layers": layers} | dict(shape)
    encoder = tiny_encoder(family, torch.float32, from_config=shape, **{"dropout": 0.2} | settings)
    for drops in (False, True):
        encoder._kernels[CPU, drops] = kernel and Kernels(kernel)
    return encoder


def dropping_encoder(family, kernel=True):
    shape = {"num_attention_heads": 2, "max_position_embeddings": 128}
    encoder = encoder_with(None, family, shape=shape, attention_dropout=0.2)
    encoder._kernels[CPU, True] = Kernels(attend, span_attention.attend_spans) if kernel else None
    return encoder


def apart(results):
    """The largest relative distance of embeddings and gradients."""
    pairs = zip(*results, strict=True)
    return max(((actual - expected).norm() / expected.norm()).item() for actual, expected in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compute_what_groups_compute(family):
    """With dropout of hidden states, then of attention weights too, and with ModernBERT's local layers."""
    encoders = (encoder_with(kernel, family, attention_dropout=0.0) for kernel in (attend, None))
    assert apart(values(encoder, random_spans(MIXED, num_selected=9)) for encoder in encoders) < 0.02
    encoders = (dropping_encoder(family, kernel) for kernel in (True, False))
    assert apart(in_float16(encoder, random_spans([9, 3, 70], num_selected=9)) for encoder in encoders) < 0.01


def test_groups_attend_where_the_kernel_cannot():
    """Float32 and dropped attention weights: the same bits with and without a kernel."""
    batch = random_spans(MIXED)
    for half in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            assert torch.equal(*(encoder_with(kernel).embed(batch) for kernel in (attend, None)))
    assert attend_in_groups._torchdynamo_disable, "it is kept out of graphs"


@pytest.mark.parametrize("family", FAMILIES)
def test_kernel_has_the_same_graphs_for_all_lengths(family):
    """Graphs without breaks, whatever the number of spans and tokens, and the same values as without graphs."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled, eager = (encoder_with(attend, family, attention_dropout=0.0) for _ in range(2))
    compile_layers(compiled.model.base_model, backend=counter, fullgraph=True)
    for lengths in (MIXED, [17], [3, 3, 3], [36, 3], [5] * 20):
        batch = random_spans(lengths, num_selected=2)
        for actual, expected in zip(values(compiled, batch), values(eager, batch), strict=True):
            assert deviation([actual], [expected]) < 1e-6
    assert counter.frame_count == (3 if family == "modernbert" else 2)  # of embeddings and of each kind of layer
    body = eager.model.base_model  # torch compiles no single norm
    assert list(parts(body)) == [body.embeddings, *(body.layers if family == "modernbert" else body.encoder.layer)]
    assert list(parts(body.embeddings)) == [body.embeddings]


def test_kernel_problem_names_capability_or_head_size():
    assert kernel_problem((9, 0), 64) is kernel_problem((8, 0), 256) is None
    says(kernel_problem((7, 5), 64), "compute capability 7.5")
    for head_size in (20, 264):
        says(kernel_problem((9, 0), head_size), "head size", head_size)
    # The backward of cuDNN, the alternative to FlashAttention, does not repeat its bits.
    assert not varlen._should_use_cudnn(0)
    layout = AttentionLayout(torch.tensor([3, 9, 3, 30]), CPU, None, None, Kernels(attend), torch.zeros(5))
    assert layout.order.tolist()[:4] == [3, 1, 0, 2], "kernels start with the longest span"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("most_weights", [1, 200, 2**26])
def test_attention_weights_of_some_spans_at_a_time_are_those_of_all(masked, most_weights, monkeypatch):
    monkeypatch.setattr("declutr.trainer.model.dropout._WEIGHTS", most_weights)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, 2, 7, 4, generator=generator).requires_grad_() for _ in range(3))
    mask = (torch.rand(5, 1, 1, 7, generator=generator) < 0.8) | (torch.arange(7) == 0) if masked else None
    drop, results = WeightDropout(torch.tensor(3), 0.3, words(1, 35, CPU).view(5, 7)), []
    for attention in (attend_with_dropout, attend_in_parts):
        out = attention(query, key, value, mask, None, drop)
        results.append([out, *torch.autograd.grad(out.square().sum(), (query, key, value))])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_compiler_problem_names_what_a_machine_lacks(monkeypatch, tmp_path):
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_vocabulary_has_the_loss_and_gradients_of_the_plain_one(family):
    """Of 64 tokens: 96 logits are computed, and those beyond the vocabulary have no part."""
    plain, padded = (tiny_encoder(family) for _ in range(2))
    layer = padded.model.get_output_embeddings()
    pad_vocabulary(layer, 48)
    assert isinstance(layer.forward, partial)
    hidden = torch.randn(5, plain.hidden_size, dtype=torch.float64)
    assert mlm_head(padded.model)(hidden).shape == (5, layer.out_features)
    losses, gradients = [], []
    for encoder in (padded, plain):
        losses.append(encoder(random_spans(MIXED, num_selected=9))[1])
        losses[-1].backward()
        gradients.append([p.grad for p in encoder.parameters() if p.grad is not None])
    assert deviation(losses[:1], losses[1:]) < 1e-12
    assert deviation(*gradients) < 1e-12


def layers_done(encoder):
    """For each bucket of the encoder's parameters, the layers whose backward has run when it is sent."""
    reducer, layers = BucketedReducer(list(encoder.model.base_model.parameters()), bucket_bytes=2**12), []

    def send(bucket):
        layers.append(len(cpukernel.BACKWARDS))
        bucket.sent = bucket.flat

    reducer._send = send
    for _ in range(2):
        cpukernel.BACKWARDS.clear()
        layers.clear()
        reducer.begin()
        reducer.arm()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = encoder.hidden(random_spans(MIXED))
        hidden.square().sum().backward()
    assert len(cpukernel.BACKWARDS) == encoder.model.config.num_hidden_layers
    assert len(layers) == len(reducer.buckets) > len(cpukernel.BACKWARDS)
    return layers


@pytest.mark.nightly
def test_compile_layers_while_the_backward_runs_sends_buckets():
    """As without compilation; in one graph of the whole encoder, all would be sent after the last layer."""
    torch._dynamo.reset()
    eager, compiled, whole = (encoder_with(attend, layers=layers, attention_dropout=0.0) for layers in (4, 4, 2))
    compile_layers(compiled.model.base_model, backend="aot_eager")
    whole.model.base_model.compile(backend="aot_eager", dynamic=True)
    expected, layers = layers_done(eager), layers_done(compiled)
    assert layers[0] == 1
    assert max(actual - plain for actual, plain in zip(layers, expected, strict=True)) <= 1
    assert set(layers_done(whole)) == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [("roberta", "kernel"), ("modernbert", "kernel")]
    + [pytest.param("roberta", layout, marks=pytest.mark.nightly) for layout in ("groups", "padded")],
)
def test_compile_layers_of_any_number_of_layers_makes_the_same_graphs(family, layout):
    """With dropped attention weights, whose masks depend on the layer's number; gradients are those without graphs."""
    kernel, rate = (attend, 0.0) if layout == "kernel" else (None, 0.2)
    settings = {"attention_dropout": rate, "layout": "padded" if layout == "padded" else "packed"}
    graphs = []
    for layers in (4 if family == "modernbert" else 2, 9):  # two of each kind, and more than torch's 8 graphs
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled, eager = (encoder_with(kernel, family, layers, **settings) for _ in range(2))
        compile_layers(compiled.model.base_model, backend=counter)
        for number, lengths in enumerate((MIXED, [17, 3])):
            batch = random_spans(lengths, num_selected=2, seed=number)
            assert deviation(values(compiled, batch)[1:], values(eager, batch)[1:]) < 1e-6
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1] > 1


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from declutr.trainer.model import span_kernels
KINDS = dict.fromkeys(("bounds", "order", "keys", "limits", "words"), "*i32")
KINDS |= dict.fromkeys(("num_words", "heads", "pitch"), "i32")
KINDS |= dict.fromkeys(("sums", "dots", "kept"), "*fp32") | {"scale": "fp32"}
CASES = (80, 128, 0, True), (89, 64, 0, False), (90, 64, 0, True), (90, 24, 65, True)
for capability, head_size, window, drop in CASES:
    constants = {"DROP": drop, "WINDOW": window, "SIZE": head_size, "WIDE": max(16, triton.next_power_of_2(head_size))}
    for kernel in (span_kernels.forward, span_kernels.backward_queries, span_kernels.backward_keys):
        kinds = {name: "constexpr" if name in constants else KINDS.get(name, "*bf16") for name in kernel.arg_names}
        source, target = ASTSource(kernel, kinds, constants), GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target)
        print(compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"), capability)
"""


def random_inputs(lengths, heads, head_size, mixed_rates):
    generator = torch.Generator().manual_seed(len(lengths))
    total = sum(lengths)
    tensors = torch.randn(4, total, heads, head_size, generator=generator)
    keys = torch.randint(-(2**31), 2**31, (total,), generator=generator, dtype=torch.int32)
    rates = torch.linspace(0, 0.9, len(lengths), dtype=torch.float64)
    rates = TokenRates.of(rates, torch.tensor(lengths)) if mixed_rates else None
    return tensors, WeightDropout(torch.tensor(3), 0.3, keys, rates)


def in_order(lengths):
    """Starts of the spans and the end, and the spans' numbers, the longest first."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    return [torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, *accumulate(lengths)], order)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "head_size", "mixed_rates", "window"),
    [
        pytest.param(*shape, mixed, window, marks=() if (shape[0], mixed, window) in DAILY else pytest.mark.nightly)
        for shape in ((3, 8), (1, 24))
        for mixed in (None, False, True)  # None: without dropout
        for window in (None, 7, 65)
    ],
)
def test_values_and_gradients_are_those_of_explicit_weights(heads, head_size, mixed_rates, window):
    """Also at the edges of blocks of 64 tokens; equal masks, or the difference would be as large as the values."""
    lengths = [64, 1, 130, 63, 65]
    (*tensors, upstream), drop = random_inputs(lengths, heads, head_size, mixed_rates)
    tensors = [tensor.clone().requires_grad_() for tensor in tensors]
    drop = None if mixed_rates is None else drop
    actual = span_attention.attend_spans(tensors, *in_order(lengths), 256, 0.2, window, drop)
    outputs = []
    for start, end in pairwise([0, *accumulate(lengths)]):
        q, k, v = (tensor[start:end].transpose(0, 1)[None] for tensor in tensors)
        place = torch.arange(end - start)
        mask = None if window is None else (place[:, None] - place[None, :]).abs() < window
        if drop is None:
            output = F.scaled_dot_product_attention(q, k, v, mask, scale=0.2)
        else:
            of_span = drop.rearranged(lambda tensor, start=start, end=end: tensor[None, start:end])
            output = attend_with_dropout(q, k, v, mask, 0.2, of_span)
        outputs.append(output[0].transpose(0, 1))
    expected = torch.cat(outputs)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(output, tensors, upstream) for output in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_operation_keeps_the_rules_of_torch():
    """Shapes without values, gradients and strides as torch.compile expects them; a repetition has the same bits."""
    (query, key, value, _), drop = random_inputs([5, 70], 2, 16, mixed_rates=True)
    dropout = [drop.keys, drop.rates.limits, drop.rates.factors.float(), torch.tensor(3)]
    spans = *in_order([5, 70]), dropout, 128, 0.25, 0
    apart, packed = [query, key, value], [torch.stack([query, key, value], 1)]
    for tensors in (apart, packed):
        arguments = [tensor.requires_grad_() for tensor in tensors], *spans
        torch.library.opcheck(span_attention._attend, arguments)
        assert torch.equal(*(span_attention._attend(*arguments)[0] for _ in range(2)))
    outputs = [span_attention._attend(tensors, *spans)[0] for tensors in (apart, packed)]
    assert torch.equal(*outputs)
    pairs = zip(outputs, (apart, packed), strict=True)
    gradients = [torch.autograd.grad(output.square().sum(), tensors) for output, tensors in pairs]
    assert torch.equal(torch.stack(gradients[0], 1), gradients[1][0])


@pytest.mark.nightly
def test_dropout_attention_has_one_graph_for_all_layers_and_lengths():
    """The backward is traced too. Dynamo repeats an analysis for it, and keeps one."""
    torch._dynamo.reset()
    counters.clear()
    compiled, eager = (dropping_encoder("roberta") for _ in range(2))
    compile_layers(compiled.model.base_model, backend="aot_eager", fullgraph=True)
    for lengths in ([9, 3, 30], [17]):
        batch = random_spans(lengths, num_selected=2)
        for actual, expected in zip(in_float16(compiled, batch), in_float16(eager, batch), strict=True):
            assert deviation([actual], [expected]) < 1e-3
    assert counters["stats"]["unique_graphs"] == 2, "one of the embeddings, and one of both layers"
    assert not counters["graph_break"]


@pytest.mark.nightly
def test_gpus_have_enough_shared_memory(tmp_path):
    """Triton compiles for GPUs without one. 99 KiB is what a program may have on the smallest, for example an L4."""
    done = run_python("-c", COMPILE, env={"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(tmp_path)})
    rows = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(rows) == 12
    assert max(size for size, *_ in rows) <= 99 * 1024
    assert all(products for _, products, capability in rows if capability == 90), "tensor cores of Hopper"


@pytest.mark.slow
def test_a_gpu_tries_the_kernel_before_it_is_used(monkeypatch):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):  # as in a first pass
        for drops in (True, False):
            assert span_attention.problem(64, CPU, drops, torch.float16) is None
    says(span_attention.problem(256, CPU), "head size", "256")
    monkeypatch.setattr(span_attention, "_TOLERANCE", 0.0)
    says(span_attention.problem(64, CPU, dtype=torch.float16), "values", "gradients", "wrong")
    # As Triton fails without a compiler, without Python's headers, and without libcuda.
    missing = subprocess.CalledProcessError(1, "gcc: Python.h: No such file or directory")
    for error in (RuntimeError("Failed to find C compiler"), missing, AssertionError("libcuda.so cannot found!")):
        monkeypatch.setattr(span_attention, "_difference", Mock(side_effect=error))
        assert f"{type(error).__name__}: {error}" in span_attention.problem(64, CPU)
