"""Alignment and uniformity against the recorded ones."""

import math

import pytest
import torch
from measures import deviation

from declutr.trainer.objectives.scores import alignment, uniformity

pytestmark = pytest.mark.golden


def test_alignment_and_uniformity_equal_the_recorded_ones(figures, measured):
    """Recorded rows are not of unit length: both scores normalise. Uniformity is over the pairs of x and y together."""
    arrays = {key: torch.tensor(value) for key, value in figures.arrays("align_uniform").items()}
    x, y = arrays["x"], arrays["y"]
    both = uniformity(torch.cat([x, y]))
    off = {
        "alignment": deviation([alignment(x, y)], [arrays["align"]]),
        "uniformity": deviation([both], [arrays["uniform_log"]]),
        "without its log": deviation([math.exp(both)], [arrays["uniform_nolog"]]),
    }
    measured(off)
    assert max(off.values()) < 1e-10
