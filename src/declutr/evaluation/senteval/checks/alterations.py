"""Checks of a split's rows against the published ones: shifted, swapped, repeated, tokenized differently."""

from collections.abc import Iterator

from declutr.evaluation.senteval.checks.published import (
    Digests,
    Published,
    digests_of,
    file_rows,
    published,
    same_sentences,
)
from declutr.evaluation.senteval.data.taskdata import DataFinding, Split, TaskData

_MIN_DISTINCT = 0.9
"""Minimum number of distinct rows, as a share of the published number."""
_MIN_DISTINCT_UNKNOWN = 0.6
"""Minimum share of distinct rows if the published number is unknown. The lowest published is 0.68 (SMTeuroparl)."""
_UNTOKENIZED = 0.3
"""Share of sentences whose last word ends in a full stop; no published set has more than 0.04."""
_NO_CORRELATION = "pairs would get the scores of other pairs: a lower correlation, down to 0"
_TRAINED_ON = "a classifier would be tested on rows that it was trained on"


def check_rows(data: TaskData, figures: Published, chance: str) -> Iterator[DataFinding]:
    """Yield one finding for each split whose rows differ from the published ones; the row counts must be right.

    `chance` is the score of a classifier that has learned nothing, "" if labels are scores.
    """
    unknown = [name for name, expected in figures.splits.items() if expected.digests is None]
    if unknown:
        yield DataFinding(
            "warn",
            f"{data.task.label} {', '.join(unknown)}: the sentences cannot be verified: no digest of the published "
            "ones is known here; numbers of rows and classes match",
        )
    for name, expected in figures.splits.items():
        split = data.splits[name]
        if expected.digests is None:
            yield from _repeated(data, name)
            continue
        found, known = digests_of(data, split), expected.digests
        where = f"{data.task.label} {name}" if len(figures.splits) > 1 else data.task.label
        if found.rows == known.rows:
            continue
        if found.gold != known.gold:
            yield _other_labels(where, found, known, chance, _owner(found.gold), bool(expected.unscored))
        else:
            yield _other_sentences(where, split, found, known, chance, _translation(found, data.task.name))


def _repeated(data: TaskData, name: str) -> Iterator[DataFinding]:
    """Find repeated rows if the published number of distinct rows is unknown."""
    rows = list(file_rows(data, data.splits[name]))
    distinct = len(set(rows))
    if data.task.procedure != "retrieval" and distinct < _MIN_DISTINCT_UNKNOWN * len(rows):
        said = f"{data.task.label} {name}: {distinct:,} of {len(rows):,} rows are distinct: rows were repeated"
        yield DataFinding("refuse", said, _TRAINED_ON)


def _other_labels(
    where: str, found: Digests, known: Digests, chance: str, owner: str, has_unscored: bool
) -> DataFinding:
    if found.rows_sorted == known.rows_sorted:
        return DataFinding("warn", f"{where}: the published rows in another order, so folds and batches differ")
    said = f"{where}: the number of labels is right, but the labels are not the published ones"
    if owner:
        return DataFinding("refuse", f"{said}: they belong to {owner}", chance or _NO_CORRELATION)
    if same_sentences(found, known):
        told = ", or moved between scored and unscored rows" if has_unscored else ""
        return DataFinding(
            "refuse", f"{said}, for the published sentences: labels were shifted, reordered or changed{told}",
            chance or _NO_CORRELATION,
        )  # fmt: skip
    if (found.first_sorted, found.second_sorted) == (known.first_sorted, known.second_sorted):
        return DataFinding("refuse", f"{said}: rows were reordered and their labels changed", chance or _NO_CORRELATION)
    return DataFinding(
        "refuse",
        f"{said}, and the sentences differ: this is another data set, for example a translation",
        "its scores may be good but are not comparable with published ones",
    )


def _other_sentences(where: str, split: Split, found: Digests, known: Digests, chance: str, owner: str) -> DataFinding:
    if same_sentences(found, known):
        form = "the original, untokenized form" if _untokenized(split) else "another tokenization or case"
        return DataFinding(
            "warn", f"{where}: contains {form} of the published sentences; SentEval's are tokenized differently"
        )
    if owner:
        return DataFinding("refuse", f"{where}: the sentences belong to {owner}", "the score of another language")
    if known.second and (found.first, found.second) == (known.second, known.first):
        return DataFinding("refuse", f"{where}: the first and the second sentences are swapped", "different scores "
                       "wherever the order of a pair matters")  # fmt: skip
    if found.rows_sorted == known.rows_sorted:
        return DataFinding("warn", f"{where}: the published rows in another order, so folds and batches differ")
    if (found.first_sorted, found.second_sorted) == (known.first_sorted, known.second_sorted):
        return DataFinding(
            "refuse",
            f"{where}: the published sentences are combined with other rows' labels or sentences: they were "
            "shifted, or exchanged between classes",
            chance or _NO_CORRELATION,
        )
    if found.distinct < _MIN_DISTINCT * known.distinct:
        return DataFinding(
            "refuse",
            f"{where}: {found.distinct:,} rows are distinct, published {known.distinct:,}: rows were repeated",
            _TRAINED_ON,
        )
    return DataFinding(
        "warn", f"{where}: the published labels with different sentences, for example a translation or another edition"
    )


def _owner(gold: str) -> str:
    """Published split with these labels; "" if none matches."""
    for task, figures in published().items():
        for name, split in figures.splits.items():
            if split.digests is not None and split.digests.gold == gold:
                return f"{task} {name}"
    return ""


def _translation(found: Digests, name: str) -> str:
    """Published split of another task with these sentences and labels; "" if none matches.

    All translations of STS-B have the same labels.
    """
    for task, figures in published().items():
        for split, known in figures.splits.items():
            same_labels = known.digests is not None and found.gold == known.digests.gold
            if task != name and same_labels and same_sentences(found, known.digests):
                return f"{task} {split}"
    return ""


def _untokenized(split: Split) -> bool:
    ends = [text.rpartition(" ")[2] for text in (*split.first, *(split.second or ()))]
    return sum(len(word) > 1 and word.endswith(".") for word in ends) > _UNTOKENIZED * len(ends)
