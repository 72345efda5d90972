"""Throughput of the collator on one core: spans drawn, cut, masked and packed.

    python -m benchmarks.feed --json OUT [--documents 16] [--seconds 3]
    python -m benchmarks.feed --content images|audio --json OUT

Images and sounds are decoded, cropped or masked, and cut into patches, in two views.

Documents are in memory, as if mapped from shards. A token counts once for each span that holds it, with the span's
special tokens, as it goes through the encoder.
"""

import io
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

from benchmarks import record, workload
from declutr.trainer.model.config import FrontendConfig
from declutr.trainer.objectives.declutr.collator import SpanCollator
from declutr.trainer.objectives.span_config import SpanConfig
from declutr.trainer.objectives.supcon.collator import ClipCollator
from declutr.trainer.objectives.supcon.config import MaskConfig, SupconConfig

_TABLES = 8  # tables of documents, used in turns, so that they do not all stay in the processor's cache
_PAPER, _SHORT = (32, 512), (8, 64)
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


def measure(spans: tuple[int, int], count: int, seconds: float, seed: int) -> dict[str, Any]:
    """Measure tokens per second of processor time with spans of these lengths."""
    setting = SpanConfig(min_tokens=spans[0], max_tokens=spans[1])
    collator = workload.Workload("distilroberta", setting, seed).collator()
    assert isinstance(collator, SpanCollator)
    size = collator.vocabulary.size
    tables = [workload.documents(step * count, count, setting, size, seed) for step in range(_TABLES)]
    collator.batch(tables[0], np.zeros(count, np.int64))
    tokens = steps = 0
    begun, waited = time.process_time(), time.perf_counter()
    while steps < _TABLES or time.process_time() - begun < seconds:
        batch = collator.batch(tables[steps % _TABLES], np.full(count, steps, np.int64))
        tokens += batch.num_tokens
        steps += 1
    # Processor time of all threads: other programs on the machine do not count, and a second core would not help.
    busy = time.process_time() - begun
    return {
        "spans": list(spans),
        "tokens_per_second_per_core": round(tokens / busy),
        "tokens_per_second_elapsed": round(tokens / (time.perf_counter() - waited)),
        "milliseconds_per_step": round(1000 * busy / steps, 3),
        "tokens_per_step": round(tokens / steps),
        "steps": steps,
    }


def measure_clips(content: str, count: int, seconds: float, seed: int) -> dict[str, Any]:
    """Measure rows per second of processor time; `fetch` runs in the tasks that read shards, the rest in the worker."""
    clips = Clips.of(content, count, seed)
    times, steps = np.zeros(2), 0
    while steps < 2 or times.sum() < seconds:
        epochs = np.full(count, steps)
        begun = time.process_time()
        rows = clips.collator.fetch.crops(clips.rows, epochs) if content == "images" else clips.rows
        fetched = time.process_time()
        clips.collator.collate(rows, epochs).spans.digest()
        times += [fetched - begun, time.process_time() - fetched]
        steps += 1
    return {
        "rows_per_second_per_core": round(float(count * steps / times.sum()), 1),
        "milliseconds_per_row_in_tasks": round(float(1000 * times[0] / (count * steps)), 3),
        "milliseconds_per_row_in_worker": round(float(1000 * times[1] / (count * steps)), 3),
        "rows_per_step": count,
        "steps": steps,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = record.parser("feed", __doc__)
    parser.add_argument("--documents", type=int, default=16, help="documents per step")
    parser.add_argument("--seconds", type=float, default=3.0, help="processor time of each measurement")
    parser.add_argument("--content", choices=("documents", "images", "audio"), default="documents")
    options = record.parse(parser, arguments)
    torch.set_num_threads(1)
    count, seconds, seed = options.documents, options.seconds, options.seed
    if options.content != "documents":
        figures = {"content": options.content, **measure_clips(options.content, count, seconds, seed)}
    else:
        paper, short = (measure(spans, count, seconds, seed) for spans in (_PAPER, _SHORT))
        speed = paper["tokens_per_second_per_core"]
        figures = {"documents": count, "tokens_per_second_per_core": speed, "paper_spans": paper, "short_spans": short}
    record.publish({"benchmark": "feed", **figures}, options)


if __name__ == "__main__":
    main()
