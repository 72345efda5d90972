"""Milliseconds of a search in an index that is open, as a service has it.

    python -m benchmarks.service --rows 10000 100000 --json OUT

Texts of ten words of 20,000, drawn with frequencies as in a language (Zipf), are embedded with `hashed-words:SIZE`,
whose own time is part of a search. Queries have three words. Each index is opened once, warmed up, and asked in turns.
"""

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import declutr
from benchmarks import record
from declutr.common import seeding

_WORDS, _LENGTH, _QUERIES = 20_000, 10, 30
_KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"dtype": "int8"},
    "float32, hybrid": {"hybrid": True},
    "int8, hybrid": {"dtype": "int8", "hybrid": True},
}


def main() -> None:
    """Measure all sizes and kinds."""
    parser = record.parser("service", __doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--size", type=int, default=384)
    options = record.parse(parser)
    figures: dict[str, Any] = {"size": options.size, "indexes": []}
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            figures["indexes"] += _measured(Path(folder), rows, options.size, options.seed)
    record.publish(figures, options)


def _measured(folder: Path, rows: int, size: int, seed: int) -> list[dict[str, Any]]:
    """Figures of each kind of index of that many texts."""
    numbers = np.arange(rows + _QUERIES, dtype=np.uint64)
    drawn = seeding.unit(seeding.words(seed, "benchmark words", numbers, np.zeros_like(numbers), _LENGTH))
    places = np.minimum(_WORDS - 1, np.expm1(drawn * np.log1p(_WORDS))).astype(np.int64)
    with (folder / "texts.txt").open("w") as file:
        file.writelines(" ".join(f"w{place}" for place in line) + "\n" for line in places[:rows])
    queries = [" ".join(f"w{place}" for place in line[:3]) for line in places[rows:]]
    declutr.embed(f"hashed-words:{size}", folder / "texts.txt", folder / "texts.npy", workers=0)
    figures = []
    for kind, settings in _KINDS.items():
        declutr.index(folder / "texts.npy", folder / "index", **settings)
        began = time.perf_counter()
        searcher = declutr.Searcher(folder / "index")
        opened = time.perf_counter() - began
        milliseconds = [_milliseconds(searcher, query) for query in [*queries[:5], *queries]][5:]
        figures.append(
            {"rows": rows, "kind": kind, "open_seconds": round(opened, 2)}
            | {"median_ms": round(float(np.median(milliseconds)), 2), "worst_ms": round(max(milliseconds), 2)}
            | {"index_bytes": sum(path.stat().st_size for path in (folder / "index").iterdir())}
            | {"resident_mib": round(record.resident())}
        )
        record.progress(str(figures[-1]))
        del searcher
        shutil.rmtree(folder / "index")
    return figures


def _milliseconds(searcher: declutr.Searcher, query: str) -> float:
    began = time.perf_counter()
    searcher.search(query, top=10)
    return 1000 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
