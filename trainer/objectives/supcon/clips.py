"""Work on images and sounds in the tasks that read shards: two views of each image, mixtures of sounds. No torch.

Every draw is a function of (seed, clip, epoch, view), so any number of workers sees the same clips. Views are cut and
coloured as by torchvision's RandomResizedCrop, flip, ColorJitter and RandomGrayscale, which draw from one generator.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from declutr.common import seeding
from declutr.common.errors import ShardError
from declutr.pipeline.media.clips import LOWEST_ENERGY
from declutr.pipeline.shards.shards import ShardSet, document_keys, ragged
from declutr.trainer.objectives.supcon.config import CropConfig

VIEWS = "views"  # column of the views: `(2, size, size, 3)` uint8 values of an image
NUM_VIEWS = 2
_TRIES = 10  # crops with random sides that may not fit, before the whole image
_RATIO = 4 / 3  # longest side over the shortest
_UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
_ORDER = 19  # uniform numbers whose tenth smallest is a draw of Beta(10, 10)


@dataclass(frozen=True)
class ClipFetch:
    """Makes the views of images, and mixes sounds with others that are drawn from the whole training split."""

    config: CropConfig  # probabilities and strengths of crops
    size: int  # height and width of a view in pixels
    seed: int  # seed of the task
    mixup: float = 0.0  # probability that a sound is mixed

    def __call__(self, rows: pa.Table, epochs: NDArray[np.int64], shards: ShardSet) -> pa.Table:
        """The rows of `shards` with the column `views`, or with mixed sounds."""
        if "image" in rows.column_names:
            return self.views(rows, epochs)
        return self.mixed(rows, epochs, shards) if self.mixup else rows

    def views(self, rows: pa.Table, epochs: NDArray[np.int64]) -> pa.Table:
        """The rows with the column `views` instead of `image`."""
        drawn, images = self._draws(rows, epochs), enumerate(_images(rows))
        views = [b"".join(self.view(image, draws[row]).tobytes() for draws in drawn) for row, image in images]
        return rows.drop_columns(["image"]).append_column(VIEWS, pa.array(views, pa.binary()))

    def whole(self, rows: pa.Table) -> pa.Table:
        """The rows with the column `views` instead of `image`; every view is the whole image."""
        size = self.size, self.size
        views = [NUM_VIEWS * image.resize(size, Image.Resampling.BILINEAR).tobytes() for image in _images(rows)]
        return rows.drop_columns(["image"]).append_column(VIEWS, pa.array(views, pa.binary()))

    def describe(self, rows: pa.Table, epochs: NDArray[np.int64]) -> list[str]:
        """Changes that make each view of each row, in words: the crop and those of its colours."""
        sizes = list(zip(rows.column("width").to_pylist(), rows.column("height").to_pylist(), strict=True))
        drawn, descriptions = self._draws(rows, epochs), []
        for number, size in enumerate(sizes):
            for box, rest in (np.split(draws[number], [3 * _TRIES]) for draws in drawn):
                left, upper, right, lower = self._box(size, box)
                names = zip(("mirrored", "recoloured", "grey"), self._changes(rest), strict=True)
                changes = "".join(f", {name}" for name, done in names if done)
                descriptions.append(f"pixels [{left}, {right}) x [{upper}, {lower}) of {size[0]} x {size[1]}{changes}")
        return descriptions

    def _draws(self, rows: pa.Table, epochs: NDArray[np.int64]) -> list[NDArray[np.float64]]:
        """`(n, 40)` numbers in [0, 1) for each view."""
        keys, minor = document_keys(rows), epochs.astype(np.uint64)
        return [
            seeding.unit(seeding.words(self.seed, f"crop {view}", keys, minor, 3 * _TRIES + 10))
            for view in range(NUM_VIEWS)
        ]

    def view(self, image: Image.Image, draws: NDArray[np.float64]) -> Image.Image:
        """One view of an image, from at least 40 numbers in [0, 1)."""
        box, rest = np.split(draws, [3 * _TRIES])
        view = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=self._box(image.size, box))
        flip, color, gray = self._changes(rest)
        if flip:
            view = ImageOps.mirror(view)
        if color:
            view = self._colored(view, rest[3:10])
        return view.convert("L").convert("RGB") if gray else view

    def _changes(self, draws: NDArray[np.float64]) -> list[bool]:
        """True if a view is mirrored, if it gets other colours, and if it becomes grey."""
        config = self.config
        return (draws[:3] < (config.hflip, config.color_jitter_prob, config.grayscale_prob)).tolist()

    def _box(self, size: tuple[int, int], draws: NDArray[np.float64]) -> tuple[int, int, int, int]:
        """Left, upper, right and lower edge of a crop; the whole image if none of the tries fits."""
        width, height = size
        for area, ratio, place in draws.reshape(_TRIES, 3):  # each try has its own draws, also if an earlier one fits
            pixels = width * height * (self.config.min_scale + area * (1 - self.config.min_scale))
            aspect = _RATIO ** (2 * ratio - 1)  # uniform in its logarithm: as often portrait as landscape
            wide, high = round((pixels * aspect) ** 0.5), round((pixels / aspect) ** 0.5)
            if 0 < wide <= width and 0 < high <= height:
                left, upper = divmod(int(place * (width - wide + 1) * (height - high + 1)), height - high + 1)
                return left, upper, left + wide, upper + high
        return 0, 0, width, height

    def _colored(self, view: Image.Image, draws: NDArray[np.float64]) -> Image.Image:
        """Changes brightness, contrast, saturation and hue, in a drawn order."""
        factors = 1 + self.config.color_jitter * (2 * draws[:3] - 1)
        hue = self.config.color_jitter / 4 * (2 * draws[3] - 1)
        ranks = np.append(draws[4:7], draws[4:7].sum() % 1)  # four numbers whose order is uniform, from three
        for step in np.argsort(ranks):
            if step == 3:
                shifted = np.array(view.convert("HSV"))
                shifted[..., 0] += np.uint8(int(hue * 255) % 256)
                view = Image.fromarray(shifted, "HSV").convert("RGB")
            else:
                kind = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[step]
                view = kind(view).enhance(float(factors[step]))
        return view

    def mixed(
        self,
        rows: pa.Table,  # n clips
        epochs: NDArray[np.int64],  # `(n,)` epoch in which each is read
        shards: ShardSet,  # the training split
    ) -> pa.Table:
        """The rows, of which some are mixed; a mixed clip has the label of the louder part."""
        chosen, partners, shares = self.drawn(rows, epochs, shards.num_documents)
        partner_rows = shards.take(partners)
        labels, other_labels = rows.column("label").to_pylist(), partner_rows.column("label").to_pylist()
        clips, other_clips = clips_of(rows), clips_of(partner_rows)
        for place, (row, share) in enumerate(zip(chosen.tolist(), shares.tolist(), strict=True)):
            clips[row] = mixture(clips[row], other_clips[place], share)
            labels[row] = labels[row] if share >= 0.5 else other_labels[place]  # argmax of the mixed labels
        offsets = np.cumsum([0, *(clip.size for clip in clips)]).astype(np.int32)
        values = np.concatenate([np.empty(0, np.float32), *(clip.reshape(-1) for clip in clips)])
        frames = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
        for name, column in (("frames", frames), ("label", pa.array(labels, pa.string()))):
            rows = rows.set_column(rows.column_names.index(name), name, column)
        return rows

    def drawn(
        self, rows: pa.Table, epochs: NDArray[np.int64], num_documents: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Numbers of the mixed clips in `rows`, of their partners in the training split, and the share of each clip."""
        words = seeding.words(self.seed, "mixup", document_keys(rows), epochs.astype(np.uint64), 2 + _ORDER)
        draws = seeding.unit(words)
        chosen = np.flatnonzero(draws[:, 0] < self.mixup)
        shares = np.sort(draws[chosen, 2:], axis=1)[:, _ORDER // 2]  # Beta(10, 10) without an inverse of its law
        return chosen, (draws[chosen, 1] * num_documents).astype(np.int64), shares


def _images(rows: pa.Table) -> Iterator[Image.Image]:
    """The images of rows, decoded one by one."""
    sizes = zip(rows.column("width").to_pylist(), rows.column("height").to_pylist(), strict=True)
    for raw, size in zip(rows.column("image"), sizes, strict=True):
        try:
            # shards hold nothing else; no other decoder runs
            with Image.open(io.BytesIO(raw.as_py()), formats=["PNG"]) as image:
                if image.size != size or image.mode != "RGB":
                    raise ShardError(f"an image is {image.mode} of {image.size} pixels, its row says RGB of {size}")
                image.load()
                decoded = image.copy()
        except _UNREADABLE as error:
            raise ShardError(f"an image of the shards cannot be decoded ({error}); prepare the images again") from error
        yield decoded


def mixture(
    clip: NDArray[np.float32],  # `(n, num_mel_bins)` log energies a
    other: NDArray[np.float32],  # `(m, num_mel_bins)` log energies b
    share: float,  # from 0 to 1
) -> NDArray[np.float32]:
    """Log energies of share * clip + (1 - share) * other, as long as the clip.

    Sounds that are not correlated add their powers: log(share^2 e^a + (1 - share)^2 e^b). The other clip is cut, or
    followed by silence.
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
