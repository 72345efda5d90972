"""The Triton kernels of attention with dropped weights, in Triton's interpreter: values, gradients, masks, graphs."""

import importlib
import subprocess
from functools import partial
from itertools import accumulate, pairwise

import cpukernel  # noqa: F401 - registers the kernels
import pytest
import torch
from measures import deviation
from messages import says
from processes import run_python
from tiny import FAMILIES, half_precision, random_spans, tiny_encoder
from torch._dynamo.utils import counters

from declutr.trainer.data.packedbatch import TokenRates
from declutr.trainer.model.attention import Kernels, attend
from declutr.trainer.model.dropout import WeightDropout, attend_with_dropout
from declutr.trainer.model.language_model import compile_layers

pytest.importorskip("triton", reason="Triton is not installed")
dropout_attention = importlib.import_module("declutr.trainer.model.dropout_attention")
values = partial(half_precision, torch.float16)  # the interpreter has no products in bfloat16

CPU = torch.device("cpu")
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from declutr.trainer.model import dropout_kernel
KINDS = dict.fromkeys(("bounds", "keys", "limits", "words"), "*i32") | dict.fromkeys(("num_words", "heads"), "i32")
KINDS |= dict.fromkeys(("sums", "dots", "kept"), "*fp32") | {"scale": "fp32"}
for capability, head_size, window in ((80, 128, 0), (89, 64, 0), (90, 24, 65)):
    constants = {"WINDOW": window, "SIZE": head_size, "WIDE": max(16, triton.next_power_of_2(head_size))}
    for kernel in (dropout_kernel.forward, dropout_kernel.backward_queries, dropout_kernel.backward_keys):
        kinds = {name: "constexpr" if name in constants else KINDS.get(name, "*bf16") for name in kernel.arg_names}
        source, target = ASTSource(kernel, kinds, constants), GPUTarget("cuda", capability, 32)
        print(triton.compile(source, target=target).metadata.shared)
"""
BOTH = Kernels(attend, dropout_attention.attend_dropout)
WIDE = {"hidden_size": 32, "num_attention_heads": 2, "initializer_range": 0.1, "max_position_embeddings": 128}


def random_inputs(lengths, heads, head_size, mixed_rates):
    """Queries, keys, values, gradients of the output, and dropout."""
    generator = torch.Generator().manual_seed(len(lengths))
    total = sum(lengths)
    tensors = torch.randn(4, total, heads, head_size, generator=generator)
    keys = torch.randint(-(2**31), 2**31, (total,), generator=generator, dtype=torch.int32)
    rates = torch.linspace(0, 0.9, len(lengths), dtype=torch.float64)
    rates = TokenRates.of(rates, torch.tensor(lengths)) if mixed_rates else None
    return tensors, WeightDropout(torch.tensor(3), 0.3, keys, rates)


def explicit(query, key, value, bounds, window, drop):
    """One span at a time."""
    made = []
    for start, end in pairwise(bounds):
        q, k, v = (each[start:end].transpose(0, 1)[None] for each in (query, key, value))
        place = torch.arange(end - start)
        mask = None if window is None else (place[:, None] - place[None, :]).abs() < window
        of_span = drop.rearranged(lambda each, start=start, end=end: each[None, start:end])
        made.append(attend_with_dropout(q, k, v, mask, 0.2, of_span)[0].transpose(0, 1))
    return torch.cat(made)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 7, pytest.param(65, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("mixed_rates", [False, True])
@pytest.mark.parametrize(("heads", "head_size"), [(3, 8), (1, 24)])
def test_values_and_gradients_are_those_of_explicit_weights(heads, head_size, mixed_rates, window):
    """Also at the edges of blocks of 64 tokens; equal masks, or the difference would be as large as the values."""
    lengths = [64, 1, 130, 63, 65]
    (*given, upstream), drop = random_inputs(lengths, heads, head_size, mixed_rates)
    given = [each.clone().requires_grad_() for each in given]
    bounds = [0, *accumulate(lengths)]
    found = dropout_attention.attend_dropout(*given, torch.tensor(bounds, dtype=torch.int32), 256, 0.2, window, drop)
    expected = explicit(*given, bounds, window, drop)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(each, given, upstream) for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_operation_keeps_the_rules_of_torch():
    """Shapes without values, gradients and strides as torch.compile expects them; a repetition has the same bits."""
    (query, key, value, _), drop = random_inputs([5, 70], 2, 16, mixed_rates=True)
    bounds = torch.tensor([0, 5, 75], dtype=torch.int32)
    given = query.requires_grad_(), key, value, bounds, drop.keys, drop.rates.limits, drop.rates.factors.float()
    torch.library.opcheck(dropout_attention._attend, (*given, torch.tensor(3), 128, 0.25, 0))
    one, two = (dropout_attention._attend(*given, torch.tensor(3), 128, 0.25, 0)[0] for _ in range(2))
    assert torch.equal(one, two)


def encoder_with(found, family):
    encoder = tiny_encoder(family, torch.float32, from_config=WIDE, dropout=0.2)
    encoder._kernels[CPU, True] = found
    return encoder


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_computes_what_groups_compute(family):
    batch = random_spans([9, 3, 70], num_selected=9)
    for one, other in zip(*(values(encoder_with(each, family), batch) for each in (BOTH, None)), strict=True):
        assert (one - other).norm() < 0.01 * other.norm()


@pytest.mark.slow
def test_dropout_attention_has_one_graph_for_all_layers_and_lengths():
    """The backward is traced too. Dynamo repeats an analysis for it, and keeps one."""
    torch._dynamo.reset()
    counters.clear()
    compiled, eager = (encoder_with(BOTH, "roberta") for _ in range(2))
    compile_layers(compiled.model.base_model, backend="aot_eager", fullgraph=True)
    for lengths in ([9, 3, 30], [17]):
        batch = random_spans(lengths, num_selected=2)
        for one, other in zip(values(compiled, batch), values(eager, batch), strict=True):
            assert deviation([one], [other]) < 1e-3
    assert counters["stats"]["unique_graphs"] == 2, "one of the embeddings, and one of both layers"
    assert not counters["graph_break"]


@pytest.mark.nightly
def test_gpus_have_enough_shared_memory(tmp_path):
    """Triton compiles for GPUs without one. 99 KiB is what a program may have on the smallest, for example an L4."""
    done = run_python("-c", COMPILE, env={"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(tmp_path)})
    assert len(sizes := [int(line) for line in done.stdout.split()]) == 9
    assert max(sizes) <= 99 * 1024


@pytest.mark.slow
def test_a_gpu_tries_the_kernel_before_it_is_used(monkeypatch):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):  # as in a first pass
        assert dropout_attention.problem(64, CPU, torch.float16) is None
    says(dropout_attention.problem(256, CPU), "head size", "256")
    monkeypatch.setattr(dropout_attention, "_TOLERANCE", 0.0)
    says(dropout_attention.problem(64, CPU, torch.float16), "values", "gradients", "wrong")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler"),
        subprocess.CalledProcessError(1, "gcc: Python.h: No such file or directory"),
        AssertionError("libcuda.so cannot found!"),
    ],
)
def test_problem_of_a_machine_that_cannot_start_kernels_is_told(monkeypatch, error):
    """As Triton fails without a compiler, without Python's headers, and without libcuda."""

    def fail(*_):
        raise error

    monkeypatch.setattr(dropout_attention, "_difference", fail)
    assert f"{type(error).__name__}: {error}" in dropout_attention.problem(64, CPU)
