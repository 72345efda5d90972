"""Work on images and sounds in the tasks that read shards; no torch."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.objectives.supcon.crops import Crops
from declutr.trainer.objectives.supcon.mixup import Mixup


@dataclass(frozen=True)
class ClipFetch:
    """Makes the views of images, and mixes sounds.

    Attributes:
        crops: views of images.
        mixup: mixtures of sounds; None: sounds are left as they are.
    """

    crops: Crops
    mixup: Mixup | None

    def __call__(self, rows: pa.Table, epochs: NDArray[np.int64], shards: ShardSet) -> pa.Table:
        """The rows of `shards` with the column `views` or, if sounds are mixed, `mixed`."""
        if "image" in rows.column_names:
            return self.crops(rows, epochs)
        return rows if self.mixup is None else self.mixup(rows, epochs, shards)
