"""SentEval's classifiers as in the released code: one fit after the other, each a module with its optimizer.

Written from the procedure, as the reference of tests. Its
generators are objects instead of global ones, with the same numbers. It repeats a fit (`split`) wherever the released
code does.
"""

import copy
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn

from declutr.evaluation.senteval.network import ClassifierConfig
from declutr.evaluation.senteval.protocols import bins
from declutr.evaluation.senteval.tasks import Split, TaskData

Array = NDArray[Any]
Scores = dict[str, float]


class _Dropout(nn.Module):
    """torch's dropout with a separate generator."""

    def __init__(self, p: float, stream: torch.Generator) -> None:
        super().__init__()
        self.p, self.stream = p, stream

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Dropout":
        return _Dropout(self.p, self.stream)  # a generator cannot be copied, and copies are only scored

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout in training mode."""
        if not self.training or self.p == 0:
            return x
        return x * torch.empty_like(x).bernoulli_(1 - self.p, generator=self.stream).div_(1 - self.p)


@dataclass
class Classifier:
    """One fit with coupled weight decay."""

    config: ClassifierConfig
    num_classes: int
    decay: float

    def fit(self, x: Array, y: Array, dev: tuple[Array, Array] | None = None) -> "Classifier":
        """Train until the tenacity is used up; without `dev`, use a random 5% of the rows."""
        config = self.config
        self.orders = np.random.RandomState(config.seed)
        self.model = self._model(x.shape[1])
        if dev is None:
            drawn = self.orders.permutation(len(x))
            count = int(0.05 * len(x))
            x, y, dev = x[drawn[count:]], y[drawn[count:]], (x[drawn[:count]], y[drawn[:count]])
        rows, labels = torch.from_numpy(x).float(), torch.from_numpy(y).long()
        kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.RMSprop
        optimizer = kind(self.model.parameters(), lr=config.rate, weight_decay=self.decay)
        best, best_model, misses, passes, stopped = -1.0, self.model, 0, 0, False
        while not stopped and passes <= config.max_epoch:
            self.model.train()
            for _ in range(config.epoch_size):
                for part in torch.from_numpy(self.orders.permutation(len(rows))).split(config.batch_size):
                    loss = nn.functional.cross_entropy(self.model(rows[part]), labels[part])
                    loss.item()  # the released code reads it
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            passes += config.epoch_size
            accuracy = self.score(*dev)
            if accuracy > best:
                best, best_model = accuracy, copy.deepcopy(self.model)
            else:
                stopped = misses >= config.tenacity
                misses += 1
        self.model, self.passes = best_model, passes
        return self

    def _model(self, width: int) -> nn.Module:
        hidden = self.config.num_hidden
        widths = [width, hidden, self.num_classes] if hidden else [width, self.num_classes]
        layers, stream = _layers(widths, self.config.seed)
        if not hidden:
            return nn.Sequential(*layers)
        return nn.Sequential(layers[0], _Dropout(self.config.dropout, stream), nn.Sigmoid(), layers[1])

    def predict(self, x: Array) -> Array:
        """Predict classes of `x`, in batches."""
        self.model.eval()
        with torch.no_grad():
            parts = torch.from_numpy(x).float().split(self.config.batch_size)
            return torch.cat([self.model(part).max(1)[1] for part in parts]).numpy()

    def score(self, x: Array, y: Array) -> float:
        """Accuracy in [0, 1]."""
        return int((self.predict(x) == y).sum()) / len(x)


def inner_kfold(x: Array, y: Array, num_classes: int, config: ClassifierConfig) -> tuple[float, float, list[float]]:
    """Dev accuracy, accuracy, accuracies of the folds (MR, CR, SUBJ, MPQA)."""
    dev, test = [], []
    for outside, inside in StratifiedKFold(config.num_folds, shuffle=True, random_state=1111).split(x, y):
        decay, mean = _choose(x[outside], y[outside], num_classes, config, 1111)
        dev.append(mean)
        refit = Classifier(config, num_classes, decay).fit(x[outside], y[outside])
        test.append(round(100 * refit.score(x[inside], y[inside]), 2))
    return float(np.round(np.mean(dev), 2)), float(np.round(np.mean(test), 2)), test


def kfold(
    x: Array, y: Array, x_test: Array, y_test: Array, num_classes: int, config: ClassifierConfig
) -> tuple[float, float, Array]:
    """Dev accuracy, accuracy, predictions on the test rows (TREC, MRPC)."""
    decay, mean = _choose(x, y, num_classes, config, config.seed)
    refit = Classifier(config, num_classes, decay).fit(x, y)
    return mean, round(100 * refit.score(x_test, y_test), 2), refit.predict(x_test)


def split(parts: dict[str, tuple[Array, Array]], num_classes: int, config: ClassifierConfig) -> tuple[float, float]:
    """Dev accuracy, accuracy (SST, SICK-E, SNLI, probing); `parts` are train, dev, test."""
    train, dev, test = parts["train"], parts["dev"], parts["test"]
    scores = []
    for decay in config.decays:
        fit = Classifier(config, num_classes, decay).fit(*train, dev)
        scores.append(round(100 * fit.score(*dev), 2))
    again = Classifier(config, num_classes, config.decays[int(np.argmax(scores))]).fit(*train, dev)
    return max(scores), round(100 * again.score(*test), 2)


def relatedness(parts: dict[str, tuple[Array, Array]], targets: Array, seed: int = 1111) -> tuple[float, float, float]:
    """Dev Pearson, Pearson, Spearman (SICK-R, STS-B); `parts` are features and scores of train, dev, test.

    Args:
        parts: (rows, features) and (rows,) scores.
        targets: (rows, 5) distributions of the training scores.
        seed: seed of weights and orders.
    """
    x, y = torch.from_numpy(parts["train"][0]).float(), torch.from_numpy(targets).float()
    orders = np.random.RandomState(seed)
    model = nn.Sequential(*_layers([x.shape[1], y.shape[1]], seed)[0], nn.Softmax(dim=-1))
    optimizer = torch.optim.Adam(model.parameters())
    levels = np.arange(1, y.shape[1] + 1)

    def predict(features: Array) -> Array:
        with torch.no_grad():
            shares = torch.cat([model(part) for part in torch.from_numpy(features).float().split(64)])
        scores: Array = shares.numpy() @ levels
        return scores

    best, best_state, misses, passes, stopped = -1.0, copy.deepcopy(model.state_dict()), 0, 0, False
    while not stopped and passes <= 1000:
        for _ in range(50):
            for part in torch.from_numpy(orders.permutation(len(x))).split(64):
                loss = nn.functional.mse_loss(model(x[part]), y[part])
                loss.item()  # the released code reads it
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        passes += 50
        pearson = float(pearsonr(predict(parts["dev"][0]), parts["dev"][1]).statistic)
        if pearson > best:
            best, best_state = pearson, copy.deepcopy(model.state_dict())
        else:
            stopped = misses >= 3
            misses += 1
    model.load_state_dict(best_state)
    found, gold = predict(parts["test"][0]), parts["test"][1]
    return best, float(pearsonr(found, gold).statistic), float(spearmanr(found, gold).statistic)


def _layers(widths: list[int], seed: int) -> tuple[list[nn.Linear], torch.Generator]:
    """Layers started like after `torch.manual_seed(seed)`, and the generator after that; the global one stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(widths)]
        stream = torch.Generator()
        stream.set_state(torch.get_rng_state())
    return layers, stream


def _choose(x: Array, y: Array, num_classes: int, config: ClassifierConfig, seed: int) -> tuple[float, float]:
    """Choose the decay with the best mean dev accuracy over folds; return it with that accuracy in percent."""
    means = []
    for decay in config.decays:
        scores = []
        for train, dev in StratifiedKFold(config.num_folds, shuffle=True, random_state=seed).split(x, y):
            fit = Classifier(config, num_classes, decay).fit(x[train], y[train], (x[dev], y[dev]))
            scores.append(fit.score(x[dev], y[dev]))
        means.append(float(np.round(100 * np.mean(scores), 2)))
    return config.decays[int(np.argmax(means))], max(means)


def _now() -> Array:
    """Wall seconds and processor seconds of this process, for differences."""
    return np.array([time.perf_counter(), time.process_time()])


class Plain:
    """The procedure on given embeddings."""

    name = "plain"

    def score(
        self, data: TaskData, rows: Mapping[str, int], embeddings: Array, config: ClassifierConfig
    ) -> tuple[dict[str, float], Array]:
        """Return a task's scores, and its wall and processor seconds."""
        begun = _now()
        scores = self._scores(data, rows, embeddings, config)
        return scores, _now() - begun

    def _scores(self, data: TaskData, rows: Mapping[str, int], embeddings: Array, config: ClassifierConfig) -> Scores:
        task, classes = data.task, len(data.classes)
        if task.procedure == "similarity":
            return _similarity(data, rows, embeddings)
        parts = {name: (_features(split, rows, embeddings, data), split.labels) for name, split in data.splits.items()}
        if task.procedure == "inner_kfold":
            dev, accuracy, _ = inner_kfold(*parts["all"], classes, config)
            return {"devacc": dev, "acc": accuracy}
        if task.procedure == "kfold":
            dev, accuracy, answers = kfold(*parts["train"], *parts["test"], classes, config)
            f1 = {"f1": round(100 * float(f1_score(parts["test"][1], answers)), 2)} if classes == 2 else {}
            return {"devacc": dev, "acc": accuracy, **f1}
        if task.procedure == "relatedness":
            dev, pearson, spearman = relatedness(parts, bins(parts["train"][1]), config.seed)
            return {"devpearson": dev, "pearson": pearson, "spearman": spearman}
        chosen = config.for_snli() if task.name == "SNLI" else config
        dev, accuracy = split(parts, classes, chosen)
        return {"devacc": dev, "acc": accuracy}


def _features(split: Split, rows: Mapping[str, int], embeddings: Array, data: TaskData) -> Array:
    first = embeddings[[rows[text] for text in split.first]]
    if split.second is None:
        return first
    second = embeddings[[rows[text] for text in split.second]]
    parts = [np.abs(first - second), first * second]
    if data.task.keep_both:
        parts = [first, second, parts[1], parts[0]]
    made: Array = np.concatenate(parts, axis=1)
    return made


def _similarity(data: TaskData, rows: Mapping[str, int], embeddings: Array) -> Scores:
    found: dict[str, list[float]] = {"spearman": [], "pearson": []}
    weights = []
    for split in data.splits.values():
        values = []
        for one, two in zip(split.first, split.second or (), strict=True):
            u, v = np.nan_to_num(embeddings[rows[one]]), np.nan_to_num(embeddings[rows[two]])
            with np.errstate(all="ignore"):
                values.append(float(np.nan_to_num(np.dot(u, v) / (np.linalg.norm(u) * np.linalg.norm(v)))))
        found["spearman"].append(float(spearmanr(values, split.labels).statistic))
        found["pearson"].append(float(pearsonr(values, split.labels).statistic))
        weights.append(len(values))
    return {
        f"{kind}.{way}": float(np.average(values, weights=weights if way == "wmean" else None))
        for kind, values in found.items()
        for way in ("mean", "wmean")
    }
