"""Remarks on a contrastive task that is too easy: a batch of few documents, or one that is told apart at the start."""

import math

from trainer.setup.config import TrainConfig

# The paper's batch. With fewer documents the loss soon has nothing left to tell apart (docs/decisions, 18).
_FEW_DOCUMENTS = 16
# Of the loss of guessing: a judgement. A run that taught nothing began at 0.117; the paper's batch costs 4.14 to guess.
_EASY_SHARE = 0.1


def small_batch(config: TrainConfig) -> str | None:
    """A line about a batch with fewer documents than the paper's, before anything starts; None where it has as many."""
    if not config.objective.contrastive or config.objective.queue_size or config.batch_documents >= _FEW_DOCUMENTS:
        return None
    return (
        f"batch_documents = {config.batch_documents}: a span is told apart from those of {config.batch_documents - 1} "
        f"other documents, in the paper from {_FEW_DOCUMENTS - 1}; so easy a task teaches little. Raise it; "
        "microbatch_tokens bounds the memory"
    )


def easy_start(config: TrainConfig, contrastive: float) -> str | None:
    """A line about a first step whose loss is far below that of guessing; None where it is not.

    Guessing among the 2M - 1 other embeddings of M anchors and their positives costs log(2M - 1).

    Args:
        config: of the run.
        contrastive: the contrastive loss of the first step.
    """
    objective = config.objective
    if not objective.contrastive or objective.loss.kind != "ntxent" or objective.released_rank_scaling:
        return None
    guessing = math.log(max(2, 2 * config.batch_documents * config.spans.num_anchors - 1))
    if contrastive >= _EASY_SHARE * guessing:
        return None
    harder = "" if config.spans.strategy == "adjacent" else ", or take spans.strategy=adjacent"
    return (
        f"the first contrastive loss is {contrastive:.3f}, and guessing would give {guessing:.2f}: this encoder tells "
        f"the spans of a batch apart already. Raise batch_documents (now {config.batch_documents}){harder}"
    )
