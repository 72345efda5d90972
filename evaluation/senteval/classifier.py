"""SentEval's classifier, fitted for many training sets and weight decays at a time.

Each fit makes the steps that the official code makes when it fits that set with that decay alone: the same start, the
same orders, the same batches, the same early stopping. What differs is the order of float additions, and dropout
where the official code runs on a GPU, whose generator is another one.

Sets of a task whose passes have the same number of batches are fitted side by side, all decays of a set on the same
rows (`network.py`). After every dev score the fits that have stopped are taken out of the arrays.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from evaluation.senteval.features import Table
from evaluation.senteval.folds import TrainingSet, orders
from evaluation.senteval.network import Network, linear_start
from evaluation.senteval.settings import ClassifierConfig
from evaluation.senteval.updates import Updates

_BLOCK_BYTES = {"cpu": 4 * 2**20, "cuda": 2**30}  # rows taken at once: what a CPU's cache holds, what fills a GPU


@dataclass(frozen=True)
class Examples:
    """Features and classes.

    Attributes:
        features: of N examples.
        labels: (N,) classes from 0, on the features' device.
    """

    features: Table
    labels: Tensor

    def __post_init__(self) -> None:
        if len(self.features) != len(self.labels):
            raise ValueError(f"{len(self.features)} embeddings but {len(self.labels)} labels")


def examples(features: Table, labels: ArrayLike) -> Examples:
    """Features with their classes.

    Raises:
        ValueError: not as many labels as rows.
    """
    return Examples(features, torch.as_tensor(np.asarray(labels, np.int64)).to(features.first.device))


@dataclass(frozen=True)
class Fits:
    """Fitted classifiers of S sets and R decays, each in its best state.

    Attributes:
        num_right: (S, R) dev examples classified rightly.
        num_dev: (S,) dev examples.
        network: of the best states.
        num_scores: (S, R) dev scores until the fit stopped.
    """

    num_right: NDArray[np.int64]
    num_dev: NDArray[np.int64]
    network: Network
    num_scores: NDArray[np.int64]

    def accuracy(self, of_set: int, decay: int) -> float:
        """Best dev accuracy of one fit, in [0, 1]."""
        return int(self.num_right[of_set, decay]) / int(self.num_dev[of_set])

    def predict(
        self, of_set: int, decay: int, features: Table, rows: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Classes that one fit gives to `rows` of `features`, None being all."""
        one = Network([p[of_set : of_set + 1, decay : decay + 1] for p in self.network.parameters])
        room = _Room(features, 1, 1)
        places = torch.from_numpy(np.arange(len(features)) if rows is None else rows).to(features.first.device)
        chosen = [one.forward(room.take(part[None])).logits[0, 0].argmax(0) for part in places.split(room.num_rows)]
        return torch.cat(chosen).cpu().numpy()


class _Room:
    """Memory for the rows of a block of sets, in the number that is good for the device."""

    def __init__(self, features: Table, num_sets: int, batch_size: int) -> None:
        self.features = features
        fitting = _BLOCK_BYTES[features.first.device.type] // (4 * features.width)
        self.num_sets = max(1, min(num_sets, fitting // batch_size))
        self.num_rows = max(batch_size, fitting // self.num_sets)  # of one set
        self.flat = features.buffer(self.num_sets * self.num_rows)

    def take(self, rows: Tensor) -> Tensor:
        return self.features.take(rows, self.flat)


def fit_many(
    train: Examples, dev: Examples, sets: Sequence[TrainingSet], decays: ArrayLike, config: ClassifierConfig,
    num_classes: int,
) -> Fits:  # fmt: skip
    """Fits every set with every decay.

    Args:
        train: what `TrainingSet.train` numbers.
        dev: what `TrainingSet.dev` numbers; may be `train`.
        sets: rows of the fits.
        decays: weight decays of the fits, (R,) for every set or (S, R).
        config: all else; its own `decays` are not read.
        num_classes: C.

    Raises:
        ValueError: a label is not in [0, C).
    """
    for name, labels in (("train", train.labels), ("dev", dev.labels)):
        if int(labels.min()) < 0 or int(labels.max()) >= num_classes:
            raise ValueError(f"{name} labels must be 0 to {num_classes - 1}, found {labels.unique().tolist()[:20]}")
    each = np.asarray(decays, np.float64)
    each = np.broadcast_to(each, (len(sets), each.shape[-1]))
    parts = []
    places: list[int] = []

    def num_batches(place: int) -> int:
        return -(-len(sets[place].train) // config.batch_size)

    for _, together in itertools.groupby(sorted(range(len(sets)), key=num_batches), key=num_batches):
        members = list(together)
        places += members
        parts.append(_Group(train, dev, [sets[m] for m in members], each[members], config, num_classes).fit())
    back = np.argsort(places)
    return Fits(
        np.concatenate([part.num_right for part in parts])[back],
        np.concatenate([part.num_dev for part in parts])[back],
        Network([torch.cat(states)[torch.from_numpy(back)] for states in zip(*(p.network.parameters for p in parts), strict=True)]),
        np.concatenate([part.num_scores for part in parts])[back],
    )


class _Group:
    """Fits whose passes have the same number of batches: they are always at the same step."""

    def __init__(
        self, train: Examples, dev: Examples, sets: Sequence[TrainingSet], decays: NDArray[np.float64],
        config: ClassifierConfig, num_classes: int,
    ) -> None:  # fmt: skip
        self.train, self.dev, self.config = train, dev, config
        self.classes = torch.arange(num_classes, device=train.labels.device)[:, None]
        device = train.labels.device
        self.rows, self.sizes = _padded([s.train for s in sets], device)
        self.dev_rows, self.dev_sizes = _padded([s.dev for s in sets], device)
        self.streams = [s.stream for s in sets]
        self.orders = {stream: orders(config.seed, *stream) for stream in self.streams}
        start = torch.Generator().manual_seed(config.seed)
        layers = [config.num_hidden, num_classes] if config.num_hidden else [num_classes]
        widths = [train.features.width, *layers]
        one = [p for pair in itertools.pairwise(widths) for p in linear_start(*pair, start)]
        # Dropout goes on in the stream that drew the starting weights; sets of one size draw the same factors.
        self.dropout = {stream: start.clone_state() for stream in self.streams} if self._has_dropout else {}
        stacked = [p.to(device).expand(*decays.shape, *p.shape).contiguous() for p in one]
        self.network = Network(stacked)
        self.updates = Updates.start(
            config.optimizer, config.rate, torch.tensor(decays, dtype=torch.float32, device=device), stacked
        )
        self.best = Network([torch.empty_like(p) for p in stacked])
        self.set_places, self.decay_places = np.arange(len(sets)), np.arange(decays.shape[1])

    @property
    def _has_dropout(self) -> bool:
        return self.config.num_hidden > 0 and self.config.dropout > 0

    def fit(self) -> Fits:
        """Trains all to their end."""
        config = self.config
        shape = (len(self.set_places), len(self.decay_places))
        num_dev = self.dev_sizes.cpu().numpy()
        most, misses, scores = np.full(shape, -1), np.zeros(shape, int), np.zeros(shape, int)
        running = np.ones(shape, bool)
        num_passes = 0
        while running.any() and num_passes <= config.max_epoch:
            self._train()
            num_passes += config.epoch_size
            here = np.ix_(self.set_places, self.decay_places)
            right = self._score()
            better = running[here] & (right > most[here])
            self._keep(better)
            most[here] = np.where(better, right, most[here])
            scores[here] += running[here]
            missed = running[here] & ~better
            running[here] &= ~(missed & (misses[here] >= config.tenacity))
            misses[here] += missed
            self._compact(running[here])
        return Fits(most, num_dev, self.best, scores)

    def _train(self) -> None:
        """`epoch_size` passes of every set that is left."""
        passes = [{stream: next(self.orders[stream]) for stream in dict.fromkeys(self.streams)}
                  for _ in range(self.config.epoch_size)]  # fmt: skip
        num_sets, batch_size = self.network.num_sets, self.config.batch_size
        room = _Room(self.train.features, num_sets, batch_size)
        after = {}
        for start in range(0, num_sets, room.num_sets):
            block = slice(start, start + room.num_sets)
            network, updates = self.network.narrow(block), self.updates.narrow(block)
            gradients = [torch.empty_like(p) for p in network.parameters]
            # Every block draws the same factors again, from a copy of the streams.
            dropout = {s: self.dropout[s].clone_state() for s in self.streams[block]} if self.dropout else {}
            for permutations in passes:
                for rows, labels, weight, kept in self._batches(block, permutations, dropout):
                    done = network.forward(room.take(rows), kept)
                    wrong = torch.softmax(done.logits, dim=2)
                    wrong -= (labels[:, None, None] == self.classes).float()
                    wrong *= weight
                    network.backward(done, wrong, gradients)
                    updates.step(network.parameters, gradients)
            after |= dropout
        self.dropout = after
        self.updates.num_steps = updates.num_steps

    def _batches(
        self, block: slice, permutations: dict[tuple[int, int], NDArray[np.int64]],
        dropout: dict[tuple[int, int], torch.Generator],
    ) -> Iterator[tuple[Tensor, Tensor, float | Tensor, Tensor | None]]:  # fmt: skip
        """Rows (S, B), labels (S, B), their weights in the loss, dropout's factors; weight 0 is padding."""
        sizes, streams, batch_size = self.sizes[block], self.streams[block], self.config.batch_size
        longest = int(sizes.max())
        order = {stream: _padded_order(permutations[stream], longest) for stream in dict.fromkeys(streams)}
        positions = torch.from_numpy(np.stack([order[stream] for stream in streams])).to(sizes.device)
        rows = self.rows[block].gather(1, positions)
        labels = self.train.labels[rows]
        whole = int(sizes.min()) // batch_size
        for number, start in enumerate(range(0, longest, batch_size)):
            part = slice(start, min(start + batch_size, longest))
            weight: float | Tensor = 1 / batch_size
            if number >= whole:
                counts = (sizes - start).clamp(max=batch_size)[:, None]
                real = torch.arange(part.stop - start, device=sizes.device) < counts
                weight = (real / counts)[:, None, None]
            kept = self._kept(streams, dropout, start, part.stop - start) if dropout else None
            yield rows[:, part], labels[:, part], weight, kept

    def _kept(
        self, streams: list[tuple[int, int]], dropout: dict[tuple[int, int], torch.Generator], start: int, width: int
    ) -> Tensor:
        """Dropout's factors (S, 1, H, B): what `torch.nn.Dropout` would draw for a batch (B, H) in each set's stream."""
        keep = 1 - self.config.dropout
        drawn = {}
        for stream in dict.fromkeys(streams):
            count = min(width, stream[1] - start)
            factors = torch.zeros(self.config.num_hidden, width)
            factors[:, :count] = torch.empty(count, self.config.num_hidden).bernoulli_(keep, generator=dropout[stream]).mT
            drawn[stream] = factors.div_(keep)
        return torch.stack([drawn[stream] for stream in streams])[:, None].to(self.sizes.device)

    def _score(self) -> NDArray[np.int64]:
        """(S, R) dev examples that are classified rightly now."""
        num_sets = self.network.num_sets
        room = _Room(self.dev.features, num_sets, self.config.batch_size)
        counts = []
        for start in range(0, num_sets, room.num_sets):
            block = slice(start, start + room.num_sets)
            network, rows, sizes = self.network.narrow(block), self.dev_rows[block], self.dev_sizes[block]
            right = torch.zeros(len(sizes), len(self.decay_places), dtype=torch.int64, device=sizes.device)
            for at, part in enumerate(rows.split(room.num_rows, dim=1)):
                chosen = network.forward(room.take(part)).logits.argmax(2)
                places = torch.arange(part.shape[1], device=sizes.device) + at * room.num_rows
                hits = (chosen == self.dev.labels[part][:, None]) & (places < sizes[:, None])[:, None]
                right += hits.sum(-1)
            counts.append(right)
        return torch.cat(counts).cpu().numpy()

    def _keep(self, better: NDArray[np.bool_]) -> None:
        sets, decays = np.nonzero(better)
        if not len(sets):
            return
        here = torch.from_numpy(sets), torch.from_numpy(decays)
        there = torch.from_numpy(self.set_places[sets]), torch.from_numpy(self.decay_places[decays])
        for best, now in zip(self.best.parameters, self.network.parameters, strict=True):
            best[there] = now[here]

    def _compact(self, running: NDArray[np.bool_]) -> None:
        """Takes out sets, and decays, of which no fit is running any more."""
        sets, decays = np.flatnonzero(running.any(1)), np.flatnonzero(running.any(0))
        if running.shape == (len(sets), len(decays)) or not len(sets):
            return
        here = torch.from_numpy(sets)[:, None], torch.from_numpy(decays)
        self.network = Network([p[here] for p in self.network.parameters])
        self.updates.moments = [[moment[here] for moment in moments] for moments in self.updates.moments]
        self.updates.decay = self.updates.decay[here]
        self.rows, self.sizes = self.rows[here[0][:, 0]], self.sizes[here[0][:, 0]]
        self.dev_rows, self.dev_sizes = self.dev_rows[here[0][:, 0]], self.dev_sizes[here[0][:, 0]]
        self.streams = [self.streams[place] for place in sets]
        self.set_places, self.decay_places = self.set_places[sets], self.decay_places[decays]


def _padded(rows: Sequence[NDArray[np.int64]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row numbers (S, longest), the missing ones 0, and how many are real."""
    sizes = [len(r) for r in rows]
    padded = np.zeros((len(rows), max(sizes)), np.int64)
    for place, own in enumerate(rows):
        padded[place, : len(own)] = own
    return torch.from_numpy(padded).to(device), torch.tensor(sizes, device=device)


def _padded_order(permutation: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    return np.concatenate([permutation, np.arange(len(permutation), length)])
