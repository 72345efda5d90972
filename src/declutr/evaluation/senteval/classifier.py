"""SentEval's classifier, fitted for many training sets and weight decays at a time.

Each fit makes the same steps as the official code for that set and that decay: the same start, the same orders, the
same batches, the same early stopping. Only the order of float additions differs. The fits run on a CPU.

Sets of a task whose passes have the same number of batches are fitted together, all decays of a set on the same rows
(`network.py`). After every dev score, stopped fits are removed from the arrays.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from declutr.evaluation.senteval.features import BlockBuffer, Rows, Table, TrainingSet, orders
from declutr.evaluation.senteval.network import ClassifierConfig, Network, Updates, linear_start

Stream = tuple[int, int]  # `TrainingSet.stream`


def _padded(rows: Sequence[Rows]) -> tuple[Tensor, Tensor]:
    """Row numbers of S sets, (S, longest), padded with 0, and the (S,) numbers of real ones."""
    sets = [torch.from_numpy(own) for own in rows]
    return torch.nn.utils.rnn.pad_sequence(sets, batch_first=True), torch.tensor(list(map(len, sets)))


@dataclass(frozen=True)
class Examples:
    """Features and classes."""

    features: Table
    labels: Tensor  # (N,) classes from 0


def examples(features: Table, labels: ArrayLike) -> Examples:
    """Combine features with their classes."""
    return Examples(features, torch.as_tensor(np.asarray(labels, np.int64)))


@dataclass(frozen=True)
class Fits:
    """Fitted classifiers of S sets and R decays, each in its best state."""

    accuracies: NDArray[np.float64]  # (S, R) best dev accuracies, in [0, 1]
    network: Network

    def predict(
        self, of_set: int, decay: int, features: Table, rows: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Classes that one fit gives to `rows` of `features`; None means all rows."""
        fit = Network([p[of_set : of_set + 1, decay : decay + 1] for p in self.network.parameters])
        buffer = BlockBuffer(features, 1, 1)
        places = torch.from_numpy(np.arange(len(features)) if rows is None else rows)
        chosen = [fit.forward(buffer.take(part[None]))[0, 0].argmax(0) for part in places.split(buffer.num_rows)]
        return torch.cat(chosen).numpy()


def fit_many(
    train: Examples,
    dev: Examples,
    sets: Sequence[TrainingSet],
    decays: ArrayLike,
    config: ClassifierConfig,
    num_classes: int,
) -> Fits:
    """Fit every set with every decay.

    `TrainingSet.train` numbers the examples of `train`, `TrainingSet.dev` those of `dev`, which may be the same. The
    weight decays are (R,) for every set or (S, R); those of `config` are ignored.
    """
    set_decays = np.asarray(decays, np.float64)
    set_decays = np.broadcast_to(set_decays, (len(sets), set_decays.shape[-1]))
    parts = []
    places: list[int] = []

    def num_batches(place: int) -> int:
        return -(-len(sets[place].train) // config.batch_size)

    # sets at one step share one product
    for _, together in itertools.groupby(sorted(range(len(sets)), key=num_batches), key=num_batches):
        members = list(together)
        places += members
        parts.append(_Group(train, dev, [sets[m] for m in members], set_decays[members], config, num_classes).fit())
    back = np.argsort(places)
    states = zip(*(part.network.parameters for part in parts), strict=True)
    return Fits(
        np.concatenate([part.accuracies for part in parts])[back],
        Network([torch.cat(parameters)[torch.from_numpy(back)] for parameters in states]),
    )


class _Group:
    """Fits whose passes have the same number of batches, so that they are always at the same step."""

    def __init__(
        self,
        train: Examples,
        dev: Examples,
        sets: Sequence[TrainingSet],
        decays: NDArray[np.float64],
        config: ClassifierConfig,
        num_classes: int,
    ) -> None:
        self.train, self.dev, self.config = train, dev, config
        self.classes = torch.arange(num_classes)[:, None]
        start = torch.Generator().manual_seed(config.seed)  # as torch.manual_seed of the official code
        parameters = linear_start(train.features.width, num_classes, start)
        # contiguous: expanded tensors share the memory of one fit
        self.network = Network([p.expand(*decays.shape, *p.shape).contiguous() for p in parameters])
        self.best = Network([torch.empty_like(p) for p in self.network.parameters])  # the first score fills it
        decay = torch.tensor(decays, dtype=torch.float32)
        self.updates = Updates.start(config.optimizer, config.rate, decay, self.network.parameters)
        # every official fit of a size starts from one seed: sets of one stream see the same positions
        self.streams = [s.stream for s in sets]
        self.orders = {stream: orders(config.seed, *stream) for stream in self.streams}
        self.members, self.sizes = _padded([s.train for s in sets])
        self.dev_members, self.dev_sizes = _padded([s.dev for s in sets])
        self.set_places, self.decay_places = np.arange(len(sets)), np.arange(decays.shape[1])

    def fit(self) -> Fits:
        """Train all fits until they stop."""
        config = self.config
        shape = (len(self.set_places), len(self.decay_places))
        # -1: the first score is always a new best
        best_right, misses = np.full(shape, -1), np.zeros(shape, int)
        running, num_dev = np.ones(shape, bool), self.dev_sizes.numpy()[:, None]
        num_passes = 0
        while running.any() and num_passes <= config.max_epoch:
            self._train()
            num_passes += config.epoch_size
            here = np.ix_(self.set_places, self.decay_places)
            right = self._score()
            better = running[here] & (right > best_right[here])
            self._keep(better)
            best_right[here] = np.where(better, right, best_right[here])
            missed = running[here] & ~better
            running[here] &= ~(missed & (misses[here] >= config.tenacity))
            misses[here] += missed  # in total, not in a row: so counts the official code
            self._compact(running[here])
        return Fits(best_right / num_dev, self.best)

    def _train(self) -> None:
        """Train every remaining set for `epoch_size` passes, block after block of sets."""
        num_sets = self.network.num_sets
        buffer = BlockBuffer(self.train.features, num_sets, self.config.batch_size)
        current = dict.fromkeys(self.streams)
        passes = [{stream: next(self.orders[stream]) for stream in current} for _ in range(self.config.epoch_size)]
        for block in buffer.blocks(num_sets):
            network, updates = self.network.narrow(block), self.updates.narrow(block)
            gradients = [torch.empty_like(p) for p in network.parameters]
            for places, labels, weight in self._batches(block, passes):
                rows = buffer.take(places)
                wrong = torch.softmax(network.forward(rows), dim=2)  # minus the truth: the gradient of cross entropy
                wrong -= (labels[:, None, None] == self.classes).float()
                wrong *= weight
                network.backward(rows, wrong, gradients)
                updates.step(network.parameters, gradients)
        self.updates.num_steps = updates.num_steps  # a view counts its own steps

    def _batches(
        self, block: slice, passes: list[dict[Stream, Rows]]
    ) -> Iterator[tuple[Tensor, Tensor, float | Tensor]]:
        """Every batch of some passes, for some of the sets.

        Yields:
            (S, B) row numbers of the training table, their labels, and the weight of each row in its set's mean loss: a
            number, or (S, 1, 1, B) with 0 for padding.
        """
        members, sizes, batch_size = self.members[block], self.sizes[block], self.config.batch_size
        streams, longest, shortest = self.streams[block], int(sizes.max()), int(sizes.min())
        tail = np.arange(longest)
        for permutations in passes:
            positions = {s: np.concatenate([permutations[s], tail[s[1] :]]) for s in dict.fromkeys(streams)}
            order = torch.from_numpy(np.stack([positions[stream] for stream in streams]))
            rows = members.gather(1, order)
            labels = self.train.labels[rows]
            for start in range(0, longest, batch_size):
                width = min(batch_size, longest - start)
                weight: float | Tensor = 1 / batch_size
                if start + batch_size > shortest:
                    counts = (sizes - start).clamp(max=batch_size)[:, None]
                    weight = ((torch.arange(width) < counts) / counts)[:, None, None]
                part = slice(start, start + width)
                yield rows[:, part], labels[:, part], weight

    def _score(self) -> NDArray[np.int64]:
        """(S, R) dev examples that are classified correctly now."""
        num_sets = self.network.num_sets
        buffer = BlockBuffer(self.dev.features, num_sets, self.config.batch_size)
        counts = []
        for block in buffer.blocks(num_sets):
            network, sizes = self.network.narrow(block), self.dev_sizes[block]
            right = torch.zeros(len(sizes), len(self.decay_places), dtype=torch.int64)
            for number, rows in enumerate(self.dev_members[block].split(buffer.num_rows, dim=1)):
                chosen = network.forward(buffer.take(rows)).argmax(2)
                places = torch.arange(rows.shape[1]) + number * buffer.num_rows
                real = (places < sizes[:, None])[:, None]
                right += ((chosen == self.dev.labels[rows][:, None]) & real).sum(-1)
            counts.append(right)
        return torch.cat(counts).numpy()

    def _keep(self, better: NDArray[np.bool_]) -> None:
        """Copy the states of the fits with a new best."""
        sets, decays = np.nonzero(better)
        here = torch.from_numpy(sets), torch.from_numpy(decays)
        there = torch.from_numpy(self.set_places[sets]), torch.from_numpy(self.decay_places[decays])
        for best, now in zip(self.best.parameters, self.network.parameters, strict=True):
            best[there] = now[here]

    def _compact(self, running: NDArray[np.bool_]) -> None:
        """Remove sets, and decays, without a running fit."""
        sets, decays = (torch.from_numpy(np.flatnonzero(running.any(axis))) for axis in (1, 0))
        if running.shape == (len(sets), len(decays)) or not len(sets):
            return
        here = sets[:, None], decays
        self.network = Network([p[here] for p in self.network.parameters])
        self.updates.moments = [[moment[here] for moment in moments] for moments in self.updates.moments]
        self.updates.decay = self.updates.decay[here]
        self.streams = [self.streams[place] for place in sets.tolist()]
        self.members, self.sizes = self.members[sets], self.sizes[sets]
        self.dev_members, self.dev_sizes = self.dev_members[sets], self.dev_sizes[sets]
        self.set_places, self.decay_places = self.set_places[sets.numpy()], self.decay_places[decays.numpy()]
