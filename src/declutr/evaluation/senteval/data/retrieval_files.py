"""Images and captions for retrieval, in files that can be opened without running code.

SentEval's COCO data are pickles. A pickle is a program, so reading one from the network lets its author run code on
this machine. Pickles are refused. Instead a split is two files in `downstream/COCO`:

- `<split>.npy`: `(I, D)` float32, features of the images (2,048 of a ResNet-101 in the published set), `numpy.save`;
- `<split>.captions.txt`: UTF-8, five lines per image in the order of the features, each the `cleaned_caption` of the
  published data. The full stop that SentEval adds is added here.

with `<split>` one of train, valid, test. Convert the published pickles on a machine that holds nothing of value.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from declutr.common.errors import DataError
from declutr.evaluation.senteval.data.formats import SplitRows
from declutr.evaluation.senteval.data.lines import read_lines

CAPTIONS_PER_IMAGE = 5
SPLITS = {"train": "train", "dev": "valid", "test": "test"}
"""Names of the splits, here and in the files."""


def refuse_pickles(folder: Path) -> None:
    """Raise DataError if a folder with missing files holds SentEval's pickles."""
    if pickles := sorted(path.name for path in folder.glob("*.pkl")):
        raise DataError(
            f"{folder}: {', '.join(pickles)} are pickles, which run code when read and are never opened here; "
            "convert them elsewhere to <split>.npy and <split>.captions.txt (docs/guides/evaluate.md)"
        )


def read_retrieval(folder: Path, split: str) -> tuple[SplitRows, NDArray[np.float32]]:
    """Captions with the index of their image, in file order, and the image features `(I, D)`.

    Raises:
        DataError: the array has another shape or type or a value that is not finite, or an image has not five captions.
    """
    path = folder / f"{SPLITS[split]}.npy"
    try:
        features = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path}: {error}") from error
    if features.ndim != 2 or features.dtype != np.float32 or not features.size:
        raise DataError(f"{path}: is {features.dtype} {features.shape}, expected float32 (images, features)")
    if not np.isfinite(features).all():
        raise DataError(f"{path}: has values that are not finite")
    captions = folder / f"{SPLITS[split]}.captions.txt"
    lines = read_lines(captions, "utf-8")
    if len(lines) != CAPTIONS_PER_IMAGE * len(features):
        raise DataError(
            f"{captions}: {len(lines):,} lines for {len(features):,} images, expected {CAPTIONS_PER_IMAGE} each"
        )
    words = [f"{line} .".split() for line in lines]
    images = np.repeat(np.arange(len(features)), CAPTIONS_PER_IMAGE)
    return SplitRows(first=words, labels=[int(image) for image in images]), features
