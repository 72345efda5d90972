"""SentEval's caption-image retrieval (COCO): two linear projections, a pairwise ranking loss, recalls over folds.

With unit projections v of an image and t of its caption, and 30 random captions t' and images v' for each pair:

    loss = sum max(0, margin - v.t + v.t') + sum max(0, margin - t.v + t.v')      over pairs and contrasts

Draws and steps are those of the official code.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from declutr.evaluation.senteval.features import Rows
from declutr.evaluation.senteval.formats import CAPTIONS_PER_IMAGE
from declutr.evaluation.senteval.network import linear_start
from declutr.trainer.objectives.scores import ahead

_PROJECTED_ROWS = 4096
_SCORED_QUERIES = 512
SIZE = 1000  # size of the common space
MARGIN = 0.2
NUM_CONTRASTS = 30  # random captions, and random images, contrasted with each pair
BATCH_SIZE = 128  # captions per step
MAX_EPOCH = 20  # last pass after which another pass may start
TENACITY = 3  # Tolerated dev scores without a new best; one more stops training
RECALLS = ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10")
"""Percentages of images with one of their captions, and of captions with their image, among the first 1, 5 and 10."""
FOLD_IMAGES = 1000  # candidate images per fold; recalls are means over folds


@dataclass(frozen=True)
class Gallery:
    """Images and their captions."""

    images: Tensor  # (I, D) float32 features
    captions: Tensor  # (5 I, E) float32 embeddings; 5 i to 5 i + 4 are those of image i


Recalls = tuple[float, ...]  # values of `RECALLS`, and the median rank (from 1) of the first caption, and of the image


def retrieval(train: Gallery, dev: Gallery, test: Gallery, *, seed: int = 1111) -> tuple[Recalls, float, int]:
    """Train the projections on `train`, keep the best on `dev`, score `test`.

    Returns:
        Recalls of `test`; the best sum of the six of `dev`; the number of passes over the training captions.
    """
    start = torch.Generator().manual_seed(seed)
    widths = (train.images.shape[1], train.captions.shape[1])
    parameters = [p.requires_grad_() for width in widths for p in linear_start(width, SIZE, start)]
    optimizer = torch.optim.Adam(parameters, fused=True)
    stream = np.random.RandomState(seed)
    best, kept, misses, num_passes, stopped = -1.0, parameters, 0, 0, False
    while not stopped and num_passes <= MAX_EPOCH:
        permutation = stream.permutation(len(train.captions))
        for begin in range(0, len(permutation), BATCH_SIZE):
            batch = permutation[begin : begin + BATCH_SIZE]
            # Images first, then captions, each in one call of the stream.
            drawn = [contrasts(stream, permutation, begin) for _ in range(2)]
            loss = _loss(train, parameters, [torch.from_numpy(part) for part in (batch, *drawn)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        num_passes += 1
        recalls_of_dev = mean_recalls(dev, parameters)
        total = sum(recalls_of_dev[:3]) + sum(recalls_of_dev[3:6])
        if total > best:
            best, kept = total, [p.detach().clone() for p in parameters]
        else:
            stopped = misses >= TENACITY
            misses += 1
    return mean_recalls(test, kept), best, num_passes


def contrasts(stream: np.random.RandomState, permutation: Rows, begin: int) -> Rows:
    """Captions (B, 30), drawn with replacement from all captions outside the batch.

    `choice` of a list with replacement is `randint` below its length; a place at or after `begin` in the list without
    the batch is one batch further in the permutation.
    """
    size = min(BATCH_SIZE, len(permutation) - begin)
    num_others = len(permutation) - size
    if not num_others:
        raise ValueError(f"{len(permutation)} training captions are one batch: there are none to contrast with")
    # The official code draws from a list of all other captions, which it builds anew at each step.
    places = stream.randint(0, num_others, size * NUM_CONTRASTS)
    return permutation[places + size * (places >= begin)].reshape(size, NUM_CONTRASTS)


def _loss(train: Gallery, parameters: list[Tensor], rows: list[Tensor]) -> Tensor:
    """Ranking loss of captions (B,) against other images and captions, given as captions (B, 30)."""
    batch, other_images, other_captions = rows

    def project_images(captions: Tensor) -> Tensor:
        return _project(train.images[captions // CAPTIONS_PER_IMAGE], *parameters[:2])

    def project_captions(captions: Tensor) -> Tensor:
        return _project(train.captions[captions], *parameters[2:])

    # The official code projects each pair once for every contrast, with the same result.
    image, caption = project_images(batch)[:, None], project_captions(batch)[:, None]  # (B, 1, size)
    pair = (image * caption).sum(-1)
    to_captions = (image * project_captions(other_captions)).sum(-1)  # (B, 30)
    to_images = (caption * project_images(other_images)).sum(-1)
    return (MARGIN - pair + to_captions).clamp(min=0).sum() + (MARGIN - pair + to_images).clamp(min=0).sum()


def _project(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    projected = F.linear(rows, weight, bias)
    return projected / projected.square().sum(-1, keepdim=True).sqrt()  # without an epsilon, as officially


@torch.no_grad()
def mean_recalls(evaluation_set: Gallery, parameters: Sequence[Tensor]) -> Recalls:
    """Means over folds of 1,000 images; an incomplete last fold is not scored, unless it is the only one.

    The official code takes five folds of 1,000 images, which is all that the published dev and test sets hold.
    """
    images = torch.cat([_project(part, *parameters[:2]) for part in evaluation_set.images.split(_PROJECTED_ROWS)])
    captions = torch.cat([_project(part, *parameters[2:]) for part in evaluation_set.captions.split(_PROJECTED_ROWS)])
    count = max(1, len(images) // FOLD_IMAGES)
    size = min(FOLD_IMAGES, len(images))
    parts = zip(images.split(size), captions.split(CAPTIONS_PER_IMAGE * size), strict=True)
    folds = [recalls(*fold) for fold in itertools.islice(parts, count)]
    return tuple(sum(values) / count for values in zip(*folds, strict=True))


def recalls(images: Tensor, captions: Tensor) -> Recalls:
    """Recalls of one fold: unit vectors (I, size) and (5 I, size).

    A rank is the number of candidates that score higher, and half of those that score the same. The official code
    sorts, with arbitrary order among equal scores.
    """
    sides = (images, captions), (captions, images)
    to_text, to_image = (
        torch.cat([part @ candidates.mT for part in queries.split(_SCORED_QUERIES)]).numpy()
        for queries, candidates in sides
    )
    places = np.arange(len(captions))
    owners = places // CAPTIONS_PER_IMAGE
    own = to_text[owners, places].reshape(-1, CAPTIONS_PER_IMAGE)
    best, paired = own.max(axis=1), to_image[places, owners]
    # captions of the image that tie with its best one are not ahead of it, nor is an image ahead of itself
    text_ranks = ahead(to_text, best, tie=0.5) - 0.5 * (own == best[:, None]).sum(axis=1)
    ranks = text_ranks, ahead(to_image, paired, tie=0.5) - 0.5
    shares = (100.0 * int((of < limit).sum()) / len(of) for of in ranks for limit in (1, 5, 10))
    return *shares, *(float(np.floor(np.median(of)) + 1) for of in ranks)
