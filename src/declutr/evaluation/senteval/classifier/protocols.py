"""SentEval's three ways from features to a score, with the official rounding.

    inner_kfold  MR CR SUBJ MPQA        one table: folds, and inner folds in each fold's training part
    kfold        TREC MRPC              train and test: folds of train choose the weight decay
    split        SST SICK-E SNLI, probing   train, dev and test

Scores are in percent. Means are rounded to two decimals wherever the official code rounds them, because a weight decay
is chosen among rounded means, and the first of equal ones wins.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from declutr.evaluation.senteval.classifier.classifier import Examples, fit_many
from declutr.evaluation.senteval.classifier.config import ClassifierConfig
from declutr.evaluation.senteval.classifier.features import TrainingSet, hold_out, stratified_folds


@dataclass(frozen=True)
class ProtocolScores:
    """Scores of a protocol, in percent."""

    dev_accuracy: float
    """Mean over outer folds of the chosen decay's cross-validation, or accuracy on the dev set."""
    accuracy: float
    """Accuracy on the test rows; over folds the mean."""
    f1: float | None
    """F1 of class 1 on the test rows, for tasks with two classes and a test set (kfold), else None."""
    decays: tuple[float, ...]
    """Chosen weight decay, one per outer fold."""
    fold_accuracies: tuple[float, ...]
    """Accuracies of the outer folds, or the one accuracy."""


def inner_kfold(data: Examples, num_classes: int, config: ClassifierConfig) -> ProtocolScores:
    """Nested cross-validation: k*(4*k + 1) fits with four decays, 410 for k = 10.

    Raises:
        ValueError: a class is too small for the folds, a label is out of range.
    """
    labels = data.labels.numpy()
    outer = stratified_folds(labels, config.num_folds)
    inner = [
        [TrainingSet(rows[train], rows[dev]) for train, dev in stratified_folds(labels[rows], config.num_folds)]
        for rows, _ in outer
    ]
    fits = fit_many(data, data, [s for sets in inner for s in sets], config.decays, config, num_classes)
    num_folds = config.num_folds
    means = [_means(fits.accuracies(slice(num_folds * fold, num_folds * (fold + 1)))) for fold in range(num_folds)]
    chosen = [int(np.argmax(mean)) for mean in means]
    best = [[config.decays[decay]] for decay in chosen]
    refits = fit_many(data, data, [hold_out(train, config.seed) for train, _ in outer], best, config, num_classes)
    tests = [
        _percent(refits.predict(fold, 0, data.features, test) == labels[test]) for fold, (_, test) in enumerate(outer)
    ]
    return ProtocolScores(
        dev_accuracy=float(np.round(np.mean([max(mean) for mean in means]), 2)),
        accuracy=float(np.round(np.mean(tests), 2)),
        f1=None,
        decays=tuple(config.decays[decay] for decay in chosen),
        fold_accuracies=tuple(tests),
    )


def kfold(train: Examples, test: Examples, num_classes: int, config: ClassifierConfig) -> ProtocolScores:
    """Cross-validation on `train` chooses the decay; a refit on 95% of `train` is tested.

    Raises:
        ValueError: a class is too small for the folds, a label is out of range.
    """
    labels = train.labels.numpy()
    sets = [TrainingSet(*fold) for fold in stratified_folds(labels, config.num_folds, config.seed)]
    fits = fit_many(train, train, sets, config.decays, config, num_classes)
    means = _means(fits.accuracies())
    chosen = int(np.argmax(means))
    refit = fit_many(
        train, train, [hold_out(np.arange(len(labels)), config.seed)], [config.decays[chosen]], config, num_classes
    )
    truth, answers = test.labels.numpy(), refit.predict(0, 0, test.features)
    accuracy = _percent(answers == truth)
    return ProtocolScores(
        dev_accuracy=max(means),
        accuracy=accuracy,
        f1=_f1(answers, truth) if num_classes == 2 else None,
        decays=(config.decays[chosen],),
        fold_accuracies=(accuracy,),
    )


def split(train: Examples, dev: Examples, test: Examples, num_classes: int, config: ClassifierConfig) -> ProtocolScores:
    """Let the dev set stop the fits and choose the decay.

    The official code then repeats the fit of the chosen decay with the same seed, which gives the same weights. Here
    the winning fit itself is tested.

    Raises:
        ValueError: a label is out of range, a set is empty.
    """
    only = TrainingSet(np.arange(len(train.labels)), np.arange(len(dev.labels)))
    fits = fit_many(train, dev, [only], config.decays, config, num_classes)
    scores = [round(100 * accuracy, 2) for accuracy in fits.accuracies()[0].tolist()]
    chosen = int(np.argmax(scores))
    answers = fits.predict(0, chosen, test.features)
    accuracy = _percent(answers == test.labels.numpy())
    return ProtocolScores(scores[chosen], accuracy, None, (config.decays[chosen],), (accuracy,))


def _means(accuracies: NDArray[np.float64]) -> list[float]:
    """Mean over sets of the accuracies (S, R) of each decay, in percent, as numpy rounds it."""
    return [float(np.round(100 * np.mean(own), 2)) for own in accuracies.T.copy()]


def _percent(right: NDArray[np.bool_]) -> float:
    return round(100 * (int(right.sum()) / len(right)), 2)  # Python's rounding, not numpy's


def _f1(answers: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    """F1 of class 1 in percent; 0 if no row has or is predicted class 1."""
    true = int(((answers == 1) & (truth == 1)).sum())
    called = int((answers == 1).sum() + (truth == 1).sum())
    return round(100 * (2 * true / called), 2) if called else 0.0
