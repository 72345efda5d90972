"""The interface that turns rows of the shards into packed spans; each objective implements it."""

from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.trainer.data.batches import RankBatch


class Collator(Protocol):
    """Turns rows of the shards into the spans of a step; NumPy only, a pure function of its arguments.

    A collator may have an attribute `fetch` (trainer/data/chunks.py) for work that the tasks that read shards do.
    """

    def collate(self, rows: pa.Table, epochs: NDArray[np.int64]) -> RankBatch:
        """The batch of a worker, on the CPU.

        Args:
            rows: n rows of the shards.
            epochs: `(n,)` epoch in which each is read.
        """
