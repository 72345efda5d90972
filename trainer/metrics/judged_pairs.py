"""Files of judged pairs, such as the development sets of STS-B and SICK-R, readable without torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from declutr.common.errors import DataError
from declutr.trainer.metrics.config import SICKR, STSB


@dataclass(frozen=True)
class PairsFile:
    """A file of judged pairs, one a line, in columns separated by tabs; some lines have notes behind them."""

    name: str  # file name
    source: str  # name of the data set
    score: int  # column of the judgement, from 0
    first: int  # column of the first text; the second text follows
    least: int  # least judgement; the largest is 5
    headed: bool = False  # true if the first line has the names of the columns


FILES = {
    STSB: PairsFile("sts-dev.csv", "STS-B", score=4, first=5, least=0),
    SICKR: PairsFile("SICK_trial.txt", "SICK", score=3, first=1, least=1, headed=True),
}  # development sets by the score that they add
STSB_TEST = replace(FILES[STSB], name="sts-test.csv")  # STS-B's test set


def read_pairs(folder: Path, file: PairsFile = FILES[STSB]) -> list[tuple[float, str, str]]:
    """Judgement and texts of each pair of a file, by default STS-B's development set."""
    path, columns = folder / file.name, slice(file.first, file.first + 2)
    num_columns = max(file.score + 1, file.first + 2)
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")  # `splitlines` also cuts at signs such as U+2028
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", error)  # without the path, which is named already
        raise DataError(f"{path}: {why}; name the folder of {file.source} with {file.name}") from error
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (file.headed and number == 1):
            continue
        fields = line.rstrip("\r").split("\t")  # not `csv`: a quotation mark is a character of its text
        try:
            score = float(fields[file.score])
            first, second = fields[columns]
        except (ValueError, IndexError) as error:
            raise DataError(
                f"{path}, line {number}: expected at least {num_columns} columns separated by tabs, a score in column "
                f"{file.score + 1}"
            ) from error
        if not file.least <= score <= 5 or not first.strip() or not second.strip():
            raise DataError(f"{path}, line {number}: a score from {file.least} to 5 and two texts are needed")
        pairs.append((score, first, second))
    if len(pairs) < 2:
        raise DataError(f"{path}: {len(pairs)} pairs, at least 2 are needed")
    return pairs


def judged_cosines(
    first: NDArray[np.float64],  # `(N, H)` embeddings of the first texts
    second: NDArray[np.float64],  # `(N, H)` embeddings of the second texts
    judgements: Sequence[float],  # N numbers
) -> NDArray[np.float64]:
    """`(N, 2)` cosine and judgement of each pair, whose Spearman correlation is the score; 0 with a null vector."""
    units = [rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12) for rows in (first, second)]
    return np.stack([(units[0] * units[1]).sum(axis=1), judgements], axis=1)
