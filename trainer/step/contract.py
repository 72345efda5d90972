"""Checks of what an objective gives in a step (facts, dropout keys, terms) for mistakes that no loss curve shows."""

import zlib
from typing import Any

import torch
from torch import Tensor

from declutr.trainer.data.batches import RankBatch
from declutr.trainer.objectives.base import Objective


def facts_problem(batch: RankBatch) -> str | None:
    """The reason why facts cannot be gathered with the rows of this rank, or None."""
    for name, values in batch.facts.items():
        if values.dtype != torch.int64 or values.shape != (batch.num_rows,):
            return (
                f"the fact {name!r} is {values.dtype} of shape {list(values.shape)}; it must be torch.int64 of shape "
                f"[{batch.num_rows}], one number for each row"
            )
    return None


def facts_code(batch: RankBatch) -> int:
    """A number of 31 bits for the names of a batch's facts and their order."""
    return zlib.crc32(repr(list(batch.facts)).encode()) & 0x7FFF_FFFF


def terms_problem(terms: Any, metrics: tuple[str, ...], views: Tensor) -> str | None:
    """The reason why an objective's terms cannot be trained or recorded, or None."""
    if not isinstance(terms, dict) or not terms:
        return f"returned {terms!r}; it must return a dict of one term or more"
    for name, value in terms.items():
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            shown = f"a {value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            return f"returned the term {name!r} as {shown}; it must be a scalar tensor of floats"
    if unknown := set(terms) - set(metrics):
        return f"has terms {sorted(unknown)}; add them to its config.metrics"
    if "mlm" in terms:
        return "has the term 'mlm', which the trainer computes; rename it"
    if views.requires_grad and not any(value.requires_grad for value in terms.values()):
        return f"has no gradient with respect to the views in any of its terms {sorted(terms)}; do not detach them"
    return None


def keys_problem(objective: Objective[Any], batch: RankBatch) -> str | None:
    """The reason why views that must differ by dropout do not, or None."""
    config = objective.config
    if not (config.needs_dropout or config.sets_rates) or not batch.num_rows or batch.spans.keys is None:
        return None
    if not batch.views_alike:
        return None
    return "all views of a row have the same dropout key, so their masks are not independent; number the spans"
