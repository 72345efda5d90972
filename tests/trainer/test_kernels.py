"""The code path of a GPU, with kernels for the CPU: attention in one call, in one graph for all lengths, and its
guard."""

import sys

import cpukernel  # noqa: F401 - registers the kernels
import pytest
import torch
from measures import deviation
from messages import says
from tiny import FAMILIES, random_spans, tiny_encoder
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import current_flash_attention_impl

from declutr.trainer.model import kernels
from declutr.trainer.model.attention import attend_in_groups
from declutr.trainer.model.compilation import compile_layers, compiler_problem
from declutr.trainer.model.dropout import WeightDropout, words
from declutr.trainer.model.kernel_choice import Kernels
from declutr.trainer.model.keyed_attention import attend_in_parts, attend_with_dropout

MIXED = [9, 3, 30, 12, 12, 4, 27, 9]
CPU = torch.device("cpu")
# Heads of 8 features: the guard refuses others.
WIDE = {"hidden_size": 32, "num_attention_heads": 4, "initializer_range": 0.1}


def encoder_with(kernel, family="roberta", **settings):
    encoder = tiny_encoder(family, torch.float32, from_config=WIDE, **settings)
    for drops in (False, True):
        encoder._kernels[CPU, drops] = kernel and Kernels(kernel)
    return encoder


def values(encoder, batch):
    """Embeddings and gradients in half precision."""
    encoder.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings, mlm = encoder(batch)
    (embeddings.square().sum() + mlm).backward()
    return embeddings, torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernel_computes_what_groups_compute(family):
    """With dropout of hidden states, and with ModernBERT's local layers, which pass a window."""
    settings = {"dropout": 0.2, "attention_dropout": 0.0}
    batch = random_spans(MIXED, num_selected=9)
    found = values(encoder_with(kernels.attend, family, **settings), batch)
    expected = values(encoder_with(None, family, **settings), batch)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


def test_groups_attend_where_the_kernel_cannot():
    """Float32 and dropped attention weights: the same bits with and without a kernel."""
    batch = random_spans(MIXED)
    with_kernel, without = (encoder_with(kernel, dropout=0.2).embed(batch) for kernel in (kernels.attend, None))
    assert torch.equal(with_kernel, without)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dropped = [encoder_with(kernel, dropout=0.2).embed(batch) for kernel in (kernels.attend, None)]
    assert torch.equal(*dropped)


@pytest.mark.parametrize("family", FAMILIES)
def test_kernel_has_the_same_graphs_for_all_lengths(family):
    """Graphs without breaks, whatever the number of spans and tokens, and the same values as without graphs."""
    torch._dynamo.reset()
    counter = CompileCounter()
    settings = {"dropout": 0.2, "attention_dropout": 0.0}
    compiled, eager = (encoder_with(kernels.attend, family, **settings) for _ in range(2))
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
    problem = kernels.problem(capability, head_size)
    if reason is None:
        assert problem is None
    else:
        says(problem, reason)


def test_use_newest_without_flash_attention_3_is_version_2():
    """FlashAttention 3 needs Hopper and its package, which no test installs."""
    assert kernels.use_newest((8, 0), 64, CPU) == kernels.use_newest((9, 0), 64, CPU) == "FA2"


def test_use_newest_with_a_package_of_another_version_stays_at_the_version_that_works(monkeypatch, tmp_path, log):
    (tmp_path / "flash_attn_interface.py").write_text("def flash_attn_varlen_func(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert kernels.use_newest((9, 0), 64, CPU) == "FA2"
    assert current_flash_attention_impl() is None
    (told,) = log
    says(told, "FlashAttention 2", "version 3")


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
    for attend, more in ((attend_with_dropout, {}), (attend_in_parts, {"most_weights": most_weights})):
        out = attend(query, key, value, mask, None, drop, **more)
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
