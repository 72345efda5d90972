"""Made-up images and sounds as the shards hold them, and their collator."""

import io
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from PIL import Image

from declutr.trainer.model.config import FrontendConfig
from declutr.trainer.objectives.supcon.collator import ClipCollator
from declutr.trainer.objectives.supcon.config import MaskConfig, SupconConfig

_LABELS = 10
_SIDES = (341, 256)  # of an image of 4:3 whose shorter side is the default of `content.shortest_edge`
_FRAMES, _MELS = 1022, 128  # of a clip of 10.24 s
_SHORT_FRAMES = 30  # of a clip of 0.3 s


@dataclass(frozen=True)
class Clips:
    """Rows of one kind of content in memory, and their collator.

    Attributes:
        rows: rows of the shards.
        collator: of a task with the settings of VisualCSE or AudioCSE.
    """

    rows: pa.Table
    collator: ClipCollator

    @staticmethod
    def of(content: str, count: int, seed: int, mixed: bool = False) -> "Clips":
        """Makes `count` rows: `images` of 341 x 256 pixels, or `audio` of 10.24 s; `mixed`: of 0.3 to 10.24 s."""
        generator = np.random.default_rng(seed)
        columns = {
            "id": pa.array([generator.bytes(16) for _ in range(count)], pa.binary(16)),
            "label": pa.array([str(number % _LABELS) for number in range(count)]),
        }
        if content == "images":
            width, height = _SIDES
            columns |= {
                "image": pa.array([_png(generator) for _ in range(count)], pa.binary()),
                "width": pa.array([width] * count, pa.int32()),
                "height": pa.array([height] * count, pa.int32()),
            }
            return Clips(pa.table(columns), ClipCollator(SupconConfig(), FrontendConfig(), seed))
        sizes = generator.integers(_SHORT_FRAMES if mixed else _FRAMES, _FRAMES + 1, count)
        frames = [generator.normal(-4, 4, size * _MELS).astype(np.float32) for size in sizes.tolist()]
        columns |= {
            "frames": pa.array(frames, pa.list_(pa.float32())),
            "num_frames": pa.array(sizes.tolist(), pa.int32()),
        }
        objective = SupconConfig(masks=MaskConfig(freq_mask=48, time_mask=192))
        return Clips(
            pa.table(columns), ClipCollator(objective, FrontendConfig(patch_size=(24, 24), positions=False), seed)
        )


def _png(generator: np.random.Generator) -> bytes:
    """A smooth image with some noise, so that its PNG has about the size of a photograph's."""
    width, height = _SIDES
    coarse = generator.integers(0, 256, (height // 32, width // 32, 3), dtype=np.uint8)
    image = np.asarray(Image.fromarray(coarse).resize(_SIDES, Image.Resampling.BICUBIC), np.int16)
    noisy = (image + generator.integers(-4, 5, image.shape)).clip(0, 255).astype(np.uint8)
    stored = io.BytesIO()
    Image.fromarray(noisy).save(stored, "PNG", compress_level=3)
    return stored.getvalue()
