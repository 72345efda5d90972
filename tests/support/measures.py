"""How far two results are apart."""

import numpy as np


def deviation(actual, expected):
    """Largest difference, relative to the largest expected entry of all: an exact 0 has no relative error."""
    pairs = [[np.asarray(part.detach().cpu() if hasattr(part, "detach") else part, np.float64) for part in pair]
             for pair in zip(actual, expected, strict=True)]  # fmt: skip
    for a, e in pairs:
        assert a.shape == e.shape, (a.shape, e.shape)
        assert np.isfinite(a).all(), "not finite"
    scale = max(np.abs(e).max(initial=0.0) for _, e in pairs)
    return float(max(np.abs(a - e).max(initial=0.0) for a, e in pairs) / (scale or 1.0))


def apart(actual, expected):
    """The larger deviation of the encoder's tensors and of the objective's, each relative to its own largest entry."""
    assert actual.keys() == expected.keys()
    kinds = [[name for name in expected if name.startswith("objective.") == own] for own in (True, False)]
    return max(deviation([actual[n] for n in names], [expected[n] for n in names]) for names in kinds if names)
