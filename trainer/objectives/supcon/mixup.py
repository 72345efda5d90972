"""Mixup of clips with others of the corpus. Runs in the tasks that read shards; no torch.

Every draw is a function of (seed, clip, epoch), so any number of workers mixes the same clips.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.pipeline.media.clips import LOWEST_ENERGY
from declutr.pipeline.shards.shards import ShardSet, document_keys, ragged

MIXED = "mixed"
"""Column that says which clips were mixed."""
_ORDER = 19
"""Uniform numbers whose tenth smallest is a draw of Beta(10, 10)."""


@dataclass(frozen=True)
class Mixup:
    """Replaces some clips by mixtures with clips that are drawn from the whole training split.

    Attributes:
        rate: probability that a clip is mixed.
        seed: seed of the task.
    """

    rate: float
    seed: int

    def __call__(self, rows: pa.Table, epochs: NDArray[np.int64], shards: ShardSet) -> pa.Table:
        """The rows with the column `mixed`; a mixed clip has the label of the louder part.

        Args:
            rows: n clips.
            epochs: `(n,)` epoch in which each is read.
            shards: the training split.
        """
        chosen, partners, shares = self.drawn(rows, epochs, shards.num_documents)
        others = shards.take(partners)
        labels, other_labels = rows.column("label").to_pylist(), others.column("label").to_pylist()
        clips, other_clips = clips_of(rows), clips_of(others)
        for place, (row, share) in enumerate(zip(chosen.tolist(), shares.tolist(), strict=True)):
            clips[row] = mixture(clips[row], other_clips[place], share)
            labels[row] = labels[row] if share >= 0.5 else other_labels[place]
        mixed = np.zeros(len(rows), np.bool_)
        mixed[chosen] = True
        offsets = np.cumsum([0, *(clip.size for clip in clips)]).astype(np.int32)
        values = np.concatenate([np.empty(0, np.float32), *(clip.reshape(-1) for clip in clips)])
        frames = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
        for name, column in (("frames", frames), ("label", pa.array(labels, pa.string()))):
            rows = rows.set_column(rows.column_names.index(name), name, column)
        return rows.append_column(MIXED, pa.array(mixed))

    def drawn(
        self, rows: pa.Table, epochs: NDArray[np.int64], num_documents: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Numbers of the mixed clips in `rows`, of their partners in the training split, and the share of each clip."""
        words = seeding.words(self.seed, "mixup", document_keys(rows), epochs.astype(np.uint64), 2 + _ORDER)
        draws = seeding.unit(words)
        chosen = np.flatnonzero(draws[:, 0] < self.rate)
        shares = np.sort(draws[chosen, 2:], axis=1)[:, _ORDER // 2]
        return chosen, (draws[chosen, 1] * num_documents).astype(np.int64), shares


def mixture(clip: NDArray[np.float32], other: NDArray[np.float32], share: float) -> NDArray[np.float32]:
    """Log energies of share * clip + (1 - share) * other, as long as the clip.

    Sounds that are not correlated add their powers: log(share^2 e^a + (1 - share)^2 e^b). The other clip is cut, or
    followed by silence.

    Args:
        clip: `(n, num_mel_bins)` log energies a.
        other: `(m, num_mel_bins)` log energies b.
        share: from 0 to 1.
    """
    powers = share**2 * np.exp(clip.astype(np.float64))
    both = min(len(clip), len(other))
    powers[:both] += (1 - share) ** 2 * np.exp(other[:both].astype(np.float64))
    return np.log(np.maximum(powers, LOWEST_ENERGY)).astype(np.float32)


def clips_of(rows: pa.Table) -> list[NDArray[np.float32]]:
    """Spectrograms `(num_frames, num_mel_bins)` of rows."""
    frames, offsets = ragged(rows.column("frames"))
    counts = rows.column("num_frames").to_numpy()
    parts = zip(offsets[:-1], offsets[1:], counts, strict=True)
    return [frames[start:end].astype(np.float32).reshape(count, -1) for start, end, count in parts]
