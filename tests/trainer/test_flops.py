"""FLOPs by hand, and against torch's own counter."""

import pytest
import torch
from tiny import FAMILIES, random_spans, tiny_encoder
from torch.utils.flop_counter import FlopCounterMode

from declutr.trainer.model.flops import gpu_name, linear_weights, peak_flops, step_flops


def test_flops_of_weights_equal_a_plain_count():
    encoder = tiny_encoder("bert")
    assert linear_weights(encoder.model) == 2 * (4 * 16 * 16 + 2 * 16 * 24)  # layers * (q, k, v, output + up, down)


def test_equal_to_torchs_counter():
    """One span: what torch counts is what the formula says, but for attention, which torch leaves out on a CPU."""
    for family in FAMILIES:
        encoder = tiny_encoder(family, layout="padded", from_config={"num_hidden_layers": 3})
        batch = random_spans([30], num_selected=7)
        with FlopCounterMode(display=False) as forward, torch.no_grad():
            encoder(batch)
        attention = 4 * 3 * 16 * 30**2
        ours = step_flops(encoder.model, linear_weights(encoder.model), batch.lengths, 7) / 3
        assert forward.get_total_flops() + attention == ours


def test_no_peak_where_none_is_known():
    assert peak_flops(gpu_name(torch.device("cpu")), half=True) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L400", None),
        ("Tesla T4", None),
    ],
)
def test_peak_of_a_gpu_follows_from_its_name(name, peak):
    assert peak_flops(name, half=True) == peak
