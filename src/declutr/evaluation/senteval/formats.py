"""File formats of SentEval's tasks, read as its loaders read them (facebookresearch/SentEval@5d6dc11).

All files hold tokenised text, except the translations of STS-B. A sentence is a list of words, split at any white
space. Rows come in file order.

SentEval's COCO data are pickles. A pickle is a program, so reading one from the network lets its author run code on
this machine. Pickles are refused. Instead a split is two files in `downstream/COCO`:

- `<split>.npy`: `(I, D)` float32, features of the images (2,048 of a ResNet-101 in the published set), `numpy.save`;
- `<split>.captions.txt`: UTF-8, five lines per image in the order of the features, each the `cleaned_caption` of the
  published data. The full stop that SentEval adds is added here.

with `<split>` one of train, valid, test. Convert the published pickles on a machine that holds nothing of value.
"""

import csv
import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from declutr.common.errors import DataError

WordList = list[str]
Parsed = TypeVar("Parsed")

CAPTIONS_PER_IMAGE = 5

TREC = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
SNLI = ("entailment", "neutral", "contradiction")
SICK = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")


@dataclass
class SplitRows:
    """Rows of one split in file order."""

    first: list[WordList] = field(default_factory=list)  # words of each row's first sentence
    # Words of each row's second sentence; empty if a row is one sentence.
    second: list[WordList] = field(default_factory=list)
    # Class number, class name (probing) or gold score of each row.
    labels: list[int] | list[str] | list[float] = field(default_factory=list)
    # `(I, D)` features of the images, of which labels are the numbers (retrieval alone).
    features: NDArray[np.float32] | None = None


def read_lines(path: Path, encoding: str, unicode_breaks: bool = False) -> list[str]:
    """Lines without their ends, in the encoding with which the official loader of the task opens the file.

    `unicode_breaks` ends lines also at the rarer separators (form feed, NEL, U+2028...), as `str.splitlines` does. Some
    of the official loaders use it, others iterate over the file.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    head = content[:512].lstrip().lower()
    for problem, is_so in (  # what failed downloads leave in place of a file
        ("is empty: its download failed", not content),
        ("is a web page, not data: its address is dead", head.startswith((b"<!doctype", b"<html", b"<?xml"))),
        ("is a Git LFS pointer, not data: `git lfs pull` fetches it", head.startswith(b"version https://git-lfs")),
        ("holds zero bytes, so it is not text: an archive, a pickle, or UTF-16", b"\0" in content[:4096]),
    ):
        if is_so:
            raise DataError(f"{path} {problem}")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}, line {number}: byte 0x{content[error.start]:02x} is not {encoding}, probably because the file is "
            "saved in latin-1 (ISO 8859-1): get the published file, do not convert it"
        ) from error
    if unicode_breaks:
        return io.StringIO(text, newline=None).read().splitlines()  # universal newlines first, as `open` does
    return [line.removesuffix("\n") for line in io.StringIO(text, newline=None)]


def parse_lines(path: Path, lines: list[str], parse: Callable[[str], Parsed], skipped: int = 0) -> list[Parsed]:
    """Parse every line except the first `skipped`."""
    parsed = []
    for number, line in enumerate(lines[skipped:], start=skipped + 1):
        try:
            parsed.append(parse(line))
        except (ValueError, KeyError, IndexError) as error:
            if not line.strip():
                raise DataError(
                    f"{path}, line {number} is blank: a row was lost there, or the line was added"
                ) from error
            text = line if len(line) <= 60 else f"{line[:60]}..."
            what = "is cut short" if isinstance(error, IndexError) else f"cannot be read ({error})"
            raise DataError(f"{path}, line {number} {what}: {text!r}") from error
    return parsed


def read_binary(ones_path: Path, zeros_path: Path) -> SplitRows:
    """MR, CR, MPQA, SUBJ: a sentence per line, a file per class; latin-1; empty lines are rows."""
    ones = [line.split() for line in read_lines(ones_path, "latin-1", unicode_breaks=True)]
    zeros = [line.split() for line in read_lines(zeros_path, "latin-1", unicode_breaks=True)]
    return SplitRows(first=ones + zeros, labels=[1] * len(ones) + [0] * len(zeros))


def read_snli(first: Path, second: Path, labels: Path) -> SplitRows:
    """Premises, hypotheses and labels, a file each; sentences latin-1, labels UTF-8."""
    # The official loader also cuts at NEL (byte 0x85), which would shift the sentences against their labels.
    columns = [read_lines(path, "latin-1") for path in (first, second)]
    names = read_lines(labels, "utf-8")
    _same_length({first: len(columns[0]), second: len(columns[1]), labels: len(names)})
    numbers = parse_lines(labels, names, lambda name: _place_in(name.strip(), SNLI))
    premises, hypotheses = ([line.split() for line in column] for column in columns)
    return SplitRows(first=premises, second=hypotheses, labels=numbers)


def read_translation(path: Path) -> SplitRows:
    """`"a","b",0..5` as CSV without a header, UTF-8; a sentence is kept as it is, as one word."""
    # lines have their ends again, because a quoted sentence may hold line breaks
    rows, reader = SplitRows(), csv.reader((f"{line}\n" for line in read_lines(path, "utf-8")), strict=True)
    scores: list[float] = []
    try:
        for cells in reader:
            if len(cells) != 3:
                raise ValueError(f"{len(cells)} cells")
            first, second, score = cells
            if reader.line_num == 1 and score == "similarity_score":  # a header, which some copies have
                continue
            rows.first.append([first] if first.strip() else [])
            rows.second.append([second] if second.strip() else [])
            scores.append(_between(float(score), 0, 5))
    except (csv.Error, ValueError) as error:
        raise DataError(f"{path}, line {reader.line_num} is not `sentence,sentence,score`: {error}") from error
    rows.labels = scores
    return rows


def read_sts(sentences: Path, scores: Path) -> SplitRows:
    """`a<TAB>b` and a file with a score 0..5 per line, UTF-8; rows with an empty score are left out."""
    lines = read_lines(sentences, "utf-8", unicode_breaks=True)
    gold = read_lines(scores, "utf-8", unicode_breaks=True)
    _same_length({sentences: len(lines), scores: len(gold)})

    def parse(line: str) -> tuple[WordList, WordList]:
        cells = line.split("\t")
        return cells[0].split(), cells[1].split()

    pairs = parse_lines(sentences, lines, parse)
    numbers = parse_lines(scores, gold, lambda line: _between(float(line), 0, 5) if line else None)
    scored = [(*pair, score) for pair, score in zip(pairs, numbers, strict=True) if score is not None]
    first, second, labels = ([row[place] for row in scored] for place in range(3))
    return SplitRows(first, second, labels)  # type: ignore[arg-type]  # the columns have these types


def read_probing(path: Path) -> dict[str, SplitRows]:
    """`tr|va|te<TAB>label<TAB>...<TAB>sentence`, UTF-8; by split, labels unchanged."""
    names = {"tr": "train", "va": "dev", "te": "test"}

    def parse(line: str) -> tuple[str, str, WordList]:
        cells = line.rstrip().split("\t")
        if cells[0] not in names:
            raise ValueError(f"{cells[0]!r} is none of {', '.join(names)}")
        return names[cells[0]], cells[1], cells[-1].split()

    parsed = parse_lines(path, read_lines(path, "utf-8"), parse)
    splits = {}
    for split in names.values():
        rows = [(label, words) for where, label, words in parsed if where == split]
        if not rows:
            raise DataError(f"{path} has no {split} rows: its end is missing")
        splits[split] = SplitRows(first=[words for _, words in rows], labels=[label for label, _ in rows])
    return splits


def read_retrieval(path: Path, captions: Path) -> SplitRows:
    """Captions with the index of their image, in file order, and the image features."""
    try:
        features = np.load(path, mmap_mode="r", allow_pickle=False)  # a pickle would run its code
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path}: {error}") from error
    if features.ndim != 2 or features.dtype != np.float32 or not features.size:
        raise DataError(f"{path}: is {features.dtype} {features.shape}, expected float32 (images, features)")
    if not np.isfinite(features).all():
        raise DataError(f"{path}: has values that are not finite")
    lines = read_lines(captions, "utf-8")
    if len(lines) != CAPTIONS_PER_IMAGE * len(features):
        raise DataError(
            f"{captions}: {len(lines):,} lines for {len(features):,} images, expected {CAPTIONS_PER_IMAGE} each"
        )
    images = np.repeat(np.arange(len(features)), CAPTIONS_PER_IMAGE).tolist()
    # SentEval adds the full stop
    return SplitRows([f"{line} .".split() for line in lines], labels=images, features=features)


def _tabbed(
    path: Path,
    texts: tuple[int, ...],
    label: Callable[[list[str]], Any],
    header: str = "",
    cut: str = "",
    encoding: str = "utf-8",
) -> SplitRows:
    """Rows of cells separated by tabs, LF or CRLF; `texts` are the columns of the sentences.

    A file with a header, of which `header` is a word, must have it. With the pattern `cut`, a row is cut into two cells
    at its first match instead.
    """
    lines = read_lines(path, encoding)
    if header not in lines[0]:  # its first pair would be skipped
        raise DataError(f"{path}, line 1: no header ({header}, ...), so the first pair would be lost")

    def parse(line: str) -> tuple[list[WordList], Any]:
        cells = re.split(cut, line.strip(), maxsplit=1) if cut else line.strip().split("\t")
        return [cells[column].split() for column in texts], label(cells)

    parsed = parse_lines(path, lines, parse, skipped=int(bool(header)))
    first, *second = ([words[number] for words, _ in parsed] for number in range(len(texts)))
    return SplitRows(first, second[0] if second else [], [number for _, number in parsed])


def _among(label: int, num_classes: int) -> int:
    if not 0 <= label < num_classes:
        raise ValueError(f"class {label} is not within 0..{num_classes - 1}")
    return label


def _place_in(name: str, names: tuple[str, ...]) -> int:
    if name not in names:
        raise ValueError(f"{name!r} is none of {', '.join(names)}")
    return names.index(name)


def _between(score: float, low: float, high: float) -> float:
    if not low <= score <= high:  # false for NaN too
        raise ValueError(f"score {score} is not within {low}..{high}")
    return score


def _same_length(lengths: dict[Path, int]) -> None:
    """Raise DataError if files that belong together line by line have different lengths."""
    if len(set(lengths.values())) == 1:
        return
    counts = ", ".join(f"{path.name} {length:,}" for path, length in lengths.items())
    where = next(iter(lengths)).parent
    raise DataError(
        f"{where}: unequal numbers of lines ({counts}): a download stopped halfway, or a file belongs to another set"
    )


read_trec = partial(
    _tabbed, texts=(1,), label=lambda cells: _place_in(cells[0], TREC), cut=":[^ ]* ", encoding="latin-1"
)  # `LABEL:fine the question`, latin-1; the fine label is dropped
read_sst_fine = partial(_tabbed, texts=(1,), label=lambda cells: _among(int(cells[0]), 5), cut=" ")  # `0..4 sentence`
read_sst_binary = partial(_tabbed, texts=(0,), label=lambda cells: _among(int(cells[1]), 2))  # `sentence<TAB>0|1`
read_mrpc = partial(_tabbed, texts=(3, 4), label=lambda cells: _among(int(cells[0]), 2), header="Quality")
"""`0|1<TAB>id<TAB>id<TAB>a<TAB>b` after a header (which has a byte order mark)."""
read_entailment = partial(_tabbed, texts=(1, 2), label=lambda cells: _place_in(cells[4], SICK), header="pair_ID")
"""`id<TAB>a<TAB>b<TAB>1..5<TAB>judgment` after a header, by the judgment; `read_relatedness` by the number."""
read_relatedness = partial(_tabbed, texts=(1, 2), label=lambda cells: _between(float(cells[3]), 1, 5), header="pair_ID")
read_sts_benchmark = partial(_tabbed, texts=(5, 6), label=lambda cells: _between(float(cells[4]), 0, 5))
"""Seven columns: ..., score 0..5, a, b; no header."""
