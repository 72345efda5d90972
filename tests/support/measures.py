"""How far two results are apart."""

from collections.abc import Iterable
from typing import Any

import numpy as np


def deviation(actual: Iterable[Any], expected: Iterable[Any]) -> float:
    """Largest absolute difference over all arrays, relative to the largest absolute expected entry of all of them.

    One scale for everything that belongs together: an entry that is 0 in exact arithmetic has no relative error.
    """
    pairs = [(_array(a), _array(e)) for a, e in zip(actual, expected, strict=True)]
    for a, e in pairs:
        assert a.shape == e.shape, (a.shape, e.shape)
        assert np.isfinite(a).all(), "not finite"
    scale = max(np.abs(e).max(initial=0.0) for _, e in pairs)
    return float(max(np.abs(a - e).max(initial=0.0) for a, e in pairs) / (scale or 1.0))


def apart(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """The larger deviation of the encoder's tensors and of the objective's, each relative to its own largest entry."""
    assert actual.keys() == expected.keys()
    kinds = [[name for name in expected if name.startswith("objective.") == own] for own in (True, False)]
    return max(deviation([actual[n] for n in names], [expected[n] for n in names]) for names in kinds if names)


def _array(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value, np.float64)
