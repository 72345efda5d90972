"""A service of search: how long an index takes to open and to answer, and what it holds in memory, by rows.

    python -m benchmarks.index --json OUT [--rows 10000 100000 1000000] [--size 384] [--folder DIR]

Texts are 40 words of a vocabulary of 60,000, drawn by Zipf's law; queries are five such words. Vectors are those of
`hashed-words`, whose query costs nothing, so that the search alone is timed; their number and type decide its time,
not where they come from. Each index is opened and asked in a process of its own, as a restarted service does.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import declutr
from benchmarks import record
from declutr.common import seeding
from declutr.common.storage import read_json, write_json

_WORDS, _TEXT_WORDS, _QUERY_WORDS = 60_000, 40, 5
_BATCH_TEXTS = 10_000
_FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"dtype": "int8"},
    "float32 hybrid": {"hybrid": True, "weight": 1.0},
    "int8 hybrid": {"dtype": "int8", "hybrid": True, "weight": 1.0},
}


def drawn_texts(count: int, num_words: int, purpose: str, seed: int) -> Iterator[str]:
    """Texts of `num_words` words each, of which the k-th most frequent one has a probability in proportion to 1 / k."""
    shares = np.cumsum(1 / np.arange(1, _WORDS + 1))
    for first in range(0, count, _BATCH_TEXTS):
        numbers = np.arange(first, min(count, first + _BATCH_TEXTS), dtype=np.uint64)
        drawn = seeding.unit(seeding.words(seed, purpose, numbers, np.zeros_like(numbers), num_words))
        for row in np.searchsorted(shares, drawn * shares[-1]).tolist():
            yield " ".join(f"w{word:x}" for word in row)


def ask(index: str, queries: int, seed: int) -> None:
    """Open an index, search it, and print the figures as JSON."""
    texts = list(drawn_texts(queries + 1, _QUERY_WORDS, "benchmark queries", seed))
    begun = time.perf_counter()
    searcher = declutr.Searcher(index)
    opened = time.perf_counter()
    searcher.search(texts[0], 10)
    first, seconds = time.perf_counter(), []
    for query in texts[1:]:
        start = time.perf_counter()
        searcher.search(query, 10)
        seconds.append(time.perf_counter() - start)
    figures = {
        "open_seconds": round(opened - begun, 2),
        "first_ms": round(1000 * (first - opened), 1),
        "median_ms": round(1000 * statistics.median(seconds), 2),
        "p95_ms": round(1000 * float(np.quantile(seconds, 0.95)), 2),
        "memory_mib": round(record.status_mib("VmHWM"), 1),
    }
    print(json.dumps(figures))


def measure(top: Path, rows: int, size: int, queries: int, seed: int) -> dict[str, dict[str, Any]]:
    """Figures of each form of an index of so many texts."""
    name = f"{rows}-{size}-{seed}"  # what decides the vectors, because a folder may hold other ones
    texts, embeddings, seconds = (top / f"{name}.{kind}" for kind in ("txt", "npy", "json"))
    if not embeddings.exists():
        with texts.open("w", encoding="ascii") as stream:
            stream.writelines(f"{text}\n" for text in drawn_texts(rows, _TEXT_WORDS, "benchmark texts", seed))
        declutr.embed(f"hashed-words:{size}", texts, embeddings)
    built: dict[str, float] = read_json(seconds) if seconds.exists() else {}
    forms = {}
    for form, options in _FORMS.items():
        index, begun = top / f"{name}-{form.replace(' ', '-')}", time.perf_counter()
        if form not in built:
            declutr.index(embeddings, index, **options)
            built[form] = round(time.perf_counter() - begun, 1)
            write_json(seconds, built)
        code = f"from benchmarks.index import ask; ask({str(index)!r}, {queries}, {seed})"
        answer = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
        num_bytes = sum(path.stat().st_size for path in index.rglob("*") if path.is_file())
        forms[form] = {"build_seconds": built[form], "disk_mib": round(num_bytes / record.MIB, 1)}
        forms[form] |= json.loads(answer)
        record.progress(f"{rows:,} rows, {form}: {forms[form]}")
    return forms


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = record.parser("index", __doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--size", type=int, default=384, help="numbers of a vector (384)")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="folder that keeps the indexes for another run")
    options = record.parse(parser, arguments)
    with tempfile.TemporaryDirectory() as aside:
        folder = options.folder or Path(aside)
        folder.mkdir(exist_ok=True)
        rows = {
            str(number): measure(folder, number, options.size, options.queries, options.seed) for number in options.rows
        }
    record.publish({"size": options.size, "queries": options.queries, "rows": rows}, options)


if __name__ == "__main__":
    main()
