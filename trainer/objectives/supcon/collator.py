"""Two views of images and sounds, cut into patches. Legend: n rows of the shards, S = 2n clips, F values of a patch."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.pipeline.shards.shards import ShardSet, document_keys
from declutr.trainer.data.batches import PatchBatch, RankBatch
from declutr.trainer.data.packing import dropout_words
from declutr.trainer.model.config import FrontendConfig
from declutr.trainer.objectives.supcon.clips import NUM_VIEWS, VIEWS, ClipFetch, clips_of
from declutr.trainer.objectives.supcon.config import SupconConfig


@dataclass(frozen=True)
class ClipCollator:
    """Cuts two views of each row into patches; the views are consecutive."""

    config: SupconConfig  # settings of the objective
    frontend: FrontendConfig  # size of patches and crops
    seed: int  # seed of the task

    @property
    def fetch(self) -> ClipFetch:
        """The work of the tasks that read shards: views of images, mixtures of sounds."""
        return ClipFetch(self.config.crops, self.frontend.image_size, self.seed, self.config.mixup)

    def collate(self, rows: pa.Table, epochs: NDArray[np.int64]) -> RankBatch:
        """The clips of n rows of images or sounds; of sounds that are to be mixed, `fetch` has mixed them."""
        keys, minor = document_keys(rows), epochs.astype(np.uint64)
        values: NDArray[Any]
        if "frames" in rows.column_names:
            values, sizes = self._sounds(rows, keys, minor)
        else:
            rows = rows if VIEWS in rows.column_names else self.fetch.views(rows, epochs)
            values, sizes = self._images(rows)
        lengths = sizes + 1
        places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        patches = np.zeros((len(places), *values.shape[1:]), values.dtype)
        patches[places > 0] = values
        words = dropout_words(
            self.seed, np.repeat(keys, NUM_VIEWS), np.repeat(minor, NUM_VIEWS), np.tile(np.arange(NUM_VIEWS), len(rows))
        )
        clips = PatchBatch(
            torch.from_numpy(patches), torch.from_numpy(places), torch.from_numpy(lengths), torch.from_numpy(words)
        )
        return RankBatch(clips, len(rows), {"label": torch.from_numpy(label_keys(rows))})

    def describe(self, rows: pa.Table, epochs: NDArray[np.int64], shards: ShardSet) -> list[str]:
        """Changes of each clip of rows that `fetch` made, in words: crops, or masks and mixtures of sounds."""
        if "frames" not in rows.column_names:
            return self.fetch.describe(rows, epochs)
        masks, changes = self._masks(document_keys(rows), epochs.astype(np.uint64)), []
        mixtures = self._mixtures(rows, epochs, shards)
        for row, clip in enumerate(clips_of(rows)):
            bands = [zip(("frames", "mel bands"), self._bands(clip.shape, mask[row]), strict=True) for mask in masks]
            mask_texts = [[f"{name} [{band.start}, {band.stop}) masked" for name, band in view] for view in bands]
            changes += [", ".join([*mixtures.get(row, []), *view]) for view in mask_texts]
        return changes

    def _mixtures(self, rows: pa.Table, epochs: NDArray[np.int64], shards: ShardSet) -> dict[int, list[str]]:
        """Share and partner of each mixed sound, in words, by its number."""
        if not self.config.mixup:
            return {}
        chosen, partners, shares = self.fetch.drawn(rows, epochs, shards.num_documents)
        partner_rows = shards.take(partners).select(["id", "source", "offset"]).to_pylist()
        phrases = (f"{partner['id'].hex()}, {partner['source']} at {partner['offset']}" for partner in partner_rows)
        drawn = zip(chosen.tolist(), shares.tolist(), phrases, strict=True)
        return {row: [f"{share:.3f} of it mixed with {1 - share:.3f} of {other}"] for row, share, other in drawn}

    def _masks(self, keys: seeding.U64, epochs: seeding.U64) -> list[NDArray[np.float64]]:
        """`(n, 4)` draws in [0, 1) by (seed, clip, epoch, view): width, start of masked frames, of mel bands."""
        # AudioCSE feeds one masked spectrogram twice
        views = [0] * NUM_VIEWS if self.config.masks.shared else range(NUM_VIEWS)
        return [seeding.unit(seeding.words(self.seed, f"mask {view}", keys, epochs, 4)) for view in views]

    def _bands(self, shape: tuple[int, ...], draws: NDArray[np.float64]) -> tuple[slice, slice]:
        """The masked frames and the masked mel bands of a clip of this shape, from four numbers of `_masks`."""
        # half of a short clip always remains
        limits = min(self.config.masks.time_mask, shape[0] // 2), min(self.config.masks.freq_mask, shape[1])
        bands = []
        for axis, limit in enumerate(limits):
            width, start = draws[2 * axis : 2 * axis + 2]
            size = int(width * (limit + 1))
            first = int(start * (shape[axis] - size + 1))
            bands.append(slice(first, first + size))
        return bands[0], bands[1]

    def _images(self, rows: pa.Table) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """`(patches, F)` values in the order of a convolution's weights (channel, row, column), and numbers by view."""
        size, (high, wide) = self.frontend.image_size, self.frontend.patch_size
        raw = b"".join(rows.column(VIEWS).to_pylist())
        images = np.frombuffer(raw, np.uint8).reshape(-1, size // high, high, size // wide, wide, 3)
        patches = images.transpose(0, 1, 3, 5, 2, 4).reshape(-1, 3 * high * wide)
        return patches, np.full(len(images), (size // high) * (size // wide), np.int64)

    def _sounds(
        self, rows: pa.Table, keys: seeding.U64, epochs: seeding.U64
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """`(patches, F)` values, the patches of the first frames first, and the number of patches of each view."""
        deep, wide = self.frontend.patch_size
        parts, sizes = [], []
        masks = self._masks(keys, epochs)
        for row, clip in enumerate(clips_of(rows)):
            count = len(clip)
            for mask in masks:
                view = clip.copy()
                frames, mels = self._bands(clip.shape, mask[row])
                view[frames] = 0
                view[:, mels] = 0
                columns, bands = max(1, count // deep), view.shape[1] // wide
                view = np.pad(view, ((0, max(0, deep - count)), (0, 0)))[: columns * deep, : bands * wide]
                parts.append(view.reshape(columns, deep, bands, wide).transpose(0, 2, 1, 3).reshape(-1, deep * wide))
                sizes.append(len(parts[-1]))
        return np.concatenate([np.empty((0, deep * wide), np.float32), *parts]), np.array(sizes, np.int64)


def label_keys(rows: pa.Table) -> NDArray[np.int64]:
    """`(n,)` int64 hashes of the labels: equal for equal labels of different shards."""
    labels = rows.column("label").to_pylist()
    digests = {label: blake2b(label.encode(), digest_size=8).digest() for label in set(labels)}
    return np.frombuffer(b"".join(digests[label] for label in labels), "<i8").astype(np.int64)
