"""Throughput of the collator on one core: spans drawn, cut, masked and packed.

    python -m benchmarks.step.feed --json OUT [--documents 16] [--seconds 3]
    python -m benchmarks.step.feed --content images|audio --json OUT

Images and sounds are decoded, cropped or masked, and cut into patches, in two views.

Documents are in memory, as if mapped from shards. A token counts once for each span that holds it, with the span's
special tokens, as it goes through the encoder.
"""

import time
from typing import Any

import numpy as np
import torch

from benchmarks import record
from benchmarks.workload import packed, texts
from benchmarks.workload.clips import Clips
from declutr.trainer.objectives.declutr.collator import SpanCollator
from declutr.trainer.objectives.span_config import SpanConfig

_TABLES = 8  # tables of documents, used in turns, so that they do not all stay in the processor's cache
_PAPER, _SHORT = (32, 512), (8, 64)


def measure(spans: tuple[int, int], count: int, seconds: float, seed: int) -> dict[str, Any]:
    """Measure tokens per second of processor time with spans of these lengths."""
    setting = SpanConfig(min_tokens=spans[0], max_tokens=spans[1])
    collator = packed.Workload("distilroberta", setting, seed).collator()
    assert isinstance(collator, SpanCollator)
    size = collator.vocabulary.size
    tables = [texts.documents(step * count, count, setting, size, seed) for step in range(_TABLES)]
    collator.batch(tables[0], np.zeros(count, np.int64))
    tokens = steps = 0
    begun, waited = time.process_time(), time.perf_counter()
    while steps < _TABLES or time.process_time() - begun < seconds:
        batch = collator.batch(tables[steps % _TABLES], np.full(count, steps, np.int64))
        tokens += batch.num_tokens
        steps += 1
    # Processor time of all threads: other programs on the machine do not count, and a second core would not help.
    taken = time.process_time() - begun
    return {
        "spans": list(spans),
        "tokens_per_second_per_core": round(tokens / taken),
        "tokens_per_second_elapsed": round(tokens / (time.perf_counter() - waited)),
        "milliseconds_per_step": round(1000 * taken / steps, 3),
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
    options = record.parser("step.feed", __doc__)
    options.add_argument("--documents", type=int, default=16, help="documents per step")
    options.add_argument("--seconds", type=float, default=3.0, help="processor time of each measurement")
    options.add_argument("--content", choices=("documents", "images", "audio"), default="documents")
    given = options.parse_args(arguments)
    torch.set_num_threads(1)
    if given.content != "documents":
        found = measure_clips(given.content, given.documents, given.seconds, given.seed)
        record.progress(f"{given.content}: {found}")
        named = {"benchmark": "feed", "content": given.content}
        record.publish({**named, **found, **record.facts("step.feed", given.commit)}, given.json)
        return
    paper = measure(_PAPER, given.documents, given.seconds, given.seed)
    record.progress(f"spans of {_PAPER} tokens: {paper}")
    short = measure(_SHORT, given.documents, given.seconds, given.seed)
    record.progress(f"spans of {_SHORT} tokens: {short}")
    figures = {
        "benchmark": "feed",
        "documents": given.documents,
        "tokens_per_second_per_core": paper["tokens_per_second_per_core"],
        "paper_spans": paper,
        "short_spans": short,
        **record.facts("step.feed", given.commit),
    }
    record.publish(figures, given.json)


if __name__ == "__main__":
    main()
