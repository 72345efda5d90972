"""The part of a corpus that a run reads: tokens in at least one of its spans. Drawn as in training, without torch."""

import math
from dataclasses import dataclass

import numpy as np

from declutr.common import seeding
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.data.plan import Plan, permute
from declutr.trainer.objectives.config import ObjectiveConfig, RunContext

_DRAWS = 20_000
"""Draws of a document in an epoch; more documents are sampled."""
_TOKENS = 20_000_000
"""Tokens of the sampled documents, about: the memory is 8 bytes each."""
_PASSES = 200


@dataclass(frozen=True)
class Coverage:
    """Tokens of sampled documents.

    Attributes:
        num_documents: sampled documents.
        num_tokens: their tokens.
        pass_tokens: tokens of them that one pass reads.
        span_tokens: tokens of the spans of one pass, which may overlap.
        read_tokens: tokens of them that all passes read at least once.
    """

    num_documents: int
    num_tokens: int
    pass_tokens: int
    span_tokens: int
    read_tokens: int

    @property
    def share(self) -> float:
        """Share of the tokens that is read at least once."""
        return self.read_tokens / max(1, self.num_tokens)


def joint_coverage(
    objective: ObjectiveConfig, run: RunContext, shards: ShardSet, plan: Plan, passes: float
) -> Coverage:
    """The part of all corpora together that this many passes of a plan read, each by its share."""
    if not plan.sizes:
        return coverage(objective, run, shards, passes)
    tokens = np.zeros(4)
    for corpus, (size, share) in enumerate(zip(plan.sizes, plan.shares, strict=True)):
        own = plan.num_documents * share / (sum(plan.shares) * size)  # passes over this corpus in one over all
        whole, once = (coverage(objective, run, shards, own * times, corpus) for times in (passes, 1.0))
        counts = (whole.num_tokens, once.read_tokens, own * once.span_tokens, whole.read_tokens)
        tokens += np.array(counts) * size / whole.num_documents
    return Coverage(plan.num_documents, *(int(count) for count in tokens))


def coverage(objective: ObjectiveConfig, run: RunContext, shards: ShardSet, passes: float, corpus: int = 0) -> Coverage:
    """The part of the training split that this many passes read, exactly or from a sample of its documents.

    The spans are those of the run; only the documents of an incomplete pass are others, as many as in the run. Of
    several corpora, one is read.
    """
    passes = min(passes, _PASSES)
    size, first = shards.sizes[corpus], sum(shards.sizes[:corpus])
    mean = shards.manifest.totals["num_tokens"] / max(1, shards.manifest.totals["kept"])
    max_documents = max(32, min(int(_DRAWS / max(1.0, passes)), int(_TOKENS / max(1.0, mean))))
    places = np.arange(min(size, max_documents))
    rows = shards.take(first + permute(seeding.key_for(run.seed, "coverage"), np.zeros_like(places), places, size))
    lengths = rows.column("num_tokens").to_numpy()
    starts = np.concatenate([[0], np.cumsum(lengths)])
    changes = np.zeros(starts[-1] + 1, np.int32)  # spans that start minus spans that end, by token
    once = spans = 0
    for epoch in range(math.ceil(passes)):
        count = math.ceil(len(places) * min(1.0, passes - epoch))
        number, start, end = objective.reads_tokens(run, rows.slice(0, count), np.full(count, epoch)).T
        np.add.at(changes, starts[number] + start, 1)
        np.add.at(changes, starts[number] + end, -1)
        if not epoch:
            once = _covered(changes) * len(places) // count
            spans = int((end - start).sum()) * len(places) // count
    return Coverage(len(places), int(starts[-1]), once, spans, _covered(changes))


def _covered(changes: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
    return int(np.count_nonzero(np.cumsum(changes[:-1]) > 0))
