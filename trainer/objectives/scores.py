"""Scores of held-out rows, of which one half chooses a checkpoint and the other reports it.

A score that has chosen is too high for what it has chosen: of many equal checkpoints, the luckiest wins.

All workers compute the embeddings of rows that the seed chooses; measures of embeddings turn them into scores.

Legend: N held-out rows, H embedding size.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from declutr.common import seeding
from declutr.common.bootstrap import F64, Statistic, mean, spearman
from declutr.common.seeding import U64
from declutr.pipeline.shards.shards import ShardSet, document_keys
from declutr.trainer.data.batches import SpanBatch
from declutr.trainer.data.plan import permute
from declutr.trainer.model.behind import Dense
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.objectives.config import REPORTED
from declutr.trainer.parallel.communicator import Communicator

_CHUNK = 256  # spans in one forward
# An "epoch" that training never reaches: what it draws for held-out rows is the same at every validation.
HELD_OUT_EPOCH = 2**32 - 1


class RowScore(float):
    """A score with the values of the rows that it is made of."""

    keys: seeding.U64  # `(N,)` keys of the rows
    values: F64  # `(N,)` values whose mean is the score, or `(N, 2)` whose Spearman correlation is, in percent

    def __new__(cls, keys: seeding.U64, values: F64) -> "RowScore":
        """The score of all rows; NaN without any."""
        score = super().__new__(cls, statistic_of(values)(values) if len(values) else float("nan"))
        score.keys, score.values = keys, values
        return score

    def __reduce__(self) -> tuple[type["RowScore"], tuple[seeding.U64, F64]]:  # a float would keep its number alone
        return RowScore, (self.keys, self.values)

    def of_half(self, seed: int, choosing: bool) -> "RowScore":
        """The score of the rows that choose, or of those that report."""
        mask = choosing_rows(seed, self.keys) == choosing
        return RowScore(self.keys[mask], self.values[mask])


def statistic_of(values: F64) -> Statistic:
    """The score of such values: their mean, or for two columns the Spearman correlation in percent."""
    return mean if values.ndim == 1 else _percent


def _percent(values: F64) -> float:
    return 100 * spearman(values)


def choosing_rows(seed: int, keys: seeding.U64) -> NDArray[np.bool_]:
    """`(N,)` true for the half that chooses: those with the smaller draws, which depend on seed and key alone."""
    drawn = seeding.words(seed, "choosing half", keys, np.zeros_like(keys), 1)[:, 0]
    chosen = np.zeros(len(keys), np.bool_)
    # half of any number of rows, where a coin for each would not be
    chosen[np.argsort(drawn, kind="stable")[: (len(keys) + 1) // 2]] = True
    return chosen


def divide(
    all_scores: Mapping[str, float],  # scores by name, of all rows
    seed: int,  # the run's seed
    score: str,  # `validation.score`
) -> tuple[dict[str, float], str, F64]:
    """Divides the scores of a validation into what chooses and what reports.

    Returns:
        Scores by name: those of rows by their choosing half, and that of `score` also by its reporting half; the name
        of the score that is reported, the first one of rows if `score` is not of rows, or "" without any; and the
        values of its reporting rows.
    """
    of_rows = {name: value for name, value in all_scores.items() if isinstance(value, RowScore)}
    scores = {**all_scores, **{name: float(value.of_half(seed, choosing=True)) for name, value in of_rows.items()}}
    if not of_rows:
        return scores, "", np.empty(0)
    name = score if score in of_rows else next(iter(of_rows))
    reporting = of_rows[name].of_half(seed, choosing=False)
    return {**scores, REPORTED + name: float(reporting)}, name, reporting.values


def by_size(
    sizes: Iterable[int],  # numbers of first numbers
    # computes the scores of embeddings cut to a size; None: whole ones.
    scores: Callable[[int | None], dict[str, float]],
) -> dict[str, float]:
    """Scores of the whole embedding by name, and those of its first numbers as `NAME_SIZE`."""
    return scores(None) | {f"{name}_{size}": value for size in sizes for name, value in scores(size).items()}


def ahead(
    scores: NDArray[Any],  # `(N, M)` scores of M candidates; `(1, M)` are those of all queries
    answers: NDArray[Any],  # `(N,)` score of each query's answer
    # share of the candidates with the answer's own score that count, the answer included if it is a candidate. 1 counts
    # them against the encoder, so that equal embeddings do not look perfect; 0.5 is the mean of orders.
    tie: float,
) -> NDArray[np.float64]:
    """`(N,)` candidates before the answer of each query by score, the measure of every retrieval of this project."""
    own = answers[:, None]
    return (scores > own).sum(axis=1) + tie * (scores == own).sum(axis=1)


def retrieval(
    anchors: Tensor,  # `(N, H)`
    positives: Tensor,  # `(N, H)`
    keys: U64,  # `(N,)` keys of the rows
) -> dict[str, float]:
    """Recall@1 and MRR of an anchor's positive among all N by cosine, scores of rows; ties count against it."""
    scores = (F.normalize(anchors, dim=-1) @ F.normalize(positives, dim=-1).T).numpy()
    ranks = ahead(scores, scores.diagonal(), tie=1.0)
    return {"recall_at_1": RowScore(keys, (ranks == 1).astype(np.float64)), "mrr": RowScore(keys, 1 / ranks)}


def alignment(anchors: Tensor, positives: Tensor) -> float:
    """Mean squared distance of pairs on the unit sphere (Wang and Isola 2020); 0 is perfect."""
    return float((F.normalize(anchors, dim=-1) - F.normalize(positives, dim=-1)).square().sum(dim=-1).mean())


def uniformity(embeddings: Tensor) -> float:
    """Log of the mean of exp(-2 ||x - y||^2) over pairs on the unit sphere (Wang and Isola 2020); lower is better."""
    # log form: VisualCSE prints it without log, but its values have it
    distances = torch.pdist(F.normalize(embeddings, dim=-1)).square()
    return float(distances.mul(-2).exp().mean().log())


def effective_rank(embeddings: Tensor) -> float:
    """Exp of the entropy of the normalised singular values of centred unit embeddings (Roy and Vetterli 2007)."""
    unit = F.normalize(embeddings, dim=-1)
    values = torch.linalg.svdvals(unit - unit.mean(dim=0))
    shares = values / values.sum().clamp_min(torch.finfo(values.dtype).tiny)  # equal embeddings have rank 1, not NaN
    return float(torch.special.entr(shares).sum().exp())


def held_out_rows(held_out: ShardSet, max_rows: int, seed: int) -> NDArray[np.int64]:
    """Numbers of at most `max_rows` held-out rows, by the run's seed, ascending; one of copies, which look the same."""
    available = held_out.num_documents
    chosen = min(max_rows, available)
    rows = np.sort(permute(seed, np.full(chosen, HELD_OUT_EPOCH), np.arange(chosen), available))
    _, firsts = np.unique(document_keys(held_out.take(rows)), return_index=True)  # the first copy stays
    return rows[np.sort(firsts)]


def embed_together(
    encoder: Encoder,  # the encoder; it is left unchanged
    total: int,  # number of spans
    batch_of: Callable[[slice], SpanBatch],  # packs the spans of a slice of `range(total)`
    layers: Sequence[Dense],  # layers behind the pooling that are exported
    comm: Communicator,  # the workers
    device: torch.device,  # device of the encoder
) -> Tensor:
    """Embeddings as exported, `(total, H)`, in float64 on the CPU, the same on every worker; without dropout."""
    width = layers[-1].linear.out_features if layers else encoder.output_size

    def embed(part: slice) -> Tensor:
        embeddings = encoder.embed(batch_of(part).to(device))
        for layer in layers:
            embeddings = layer(embeddings.to(layer.linear.weight.dtype))
        return embeddings

    return compute_together(encoder, total, width, embed, comm, device, _CHUNK)


def compute_together(
    encoder: Encoder,  # the encoder, which is in evaluation mode meanwhile
    total: int,  # number of rows
    width: int,  # numbers in a row
    # computes the rows of a slice of `range(total)`, with forwards of the encoder; the slice may be empty.
    rows_of: Callable[[slice], Tensor],
    comm: Communicator,  # as of `embed_together`
    device: torch.device,  # likewise
    chunk: int,  # number of rows computed at a time
) -> Tensor:
    """A table of `total` rows, `(total, width)`, in float64 on the CPU, of which each worker computes a share."""
    was_training = encoder.training
    encoder.eval()
    start, end = comm.row_range(total, chunk)  # whole chunks if bits may not depend on the workers
    forwards = -(-(end - start) // chunk)
    if encoder.sharded:  # forwards gather weights, so every worker runs the same number
        forwards = comm.all_reduce_max(forwards)
    parts = [torch.empty(0, width, device=device, dtype=torch.float64)]
    with torch.no_grad():
        for number in range(forwards):
            first = start + number * chunk
            parts.append(rows_of(slice(first, min(end, first + chunk))).double())
        table = comm.all_gather(torch.cat(parts), start, total)
    encoder.train(was_training)
    return table.cpu()
