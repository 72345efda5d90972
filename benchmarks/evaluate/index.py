"""Size, seconds and memory of a hybrid index of many texts, float32 and int8, through the command `declutr index`.

    python -m benchmarks.evaluate.index --sentences FILE --texts 1000000 --work FOLDER --json OUT

The texts are new: each has 20 words, drawn by key from all words of a file of sentences, frequent words more often.
Their vectors are those of `hashed-words:SIZE`, because a transformer would need hours for a million texts on two cores.
They say nothing about quality. Memory is the peak resident size of the process, pages of mapped files included.
It is never below that of this benchmark (about 590 MiB), from which the process is forked.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import facts, parser, progress, publish
from declutr.common import seeding
from declutr.common.words import lexical_words
from declutr.embedding.index import SearchIndex
from declutr.encoders.loading import load_encoder

_WORDS_PER_TEXT, _QUERY_WORDS, _QUERIES = 20, 6, 20
_CHUNK_TEXTS = 10_000


def main() -> None:
    """Run the command."""
    options = parser("evaluate.index", __doc__)
    options.add_argument("--sentences", type=Path, required=True, help="file with a sentence a line")
    options.add_argument("--texts", type=int, default=1_000_000)
    options.add_argument("--size", type=int, default=128, help="numbers in a vector")
    options.add_argument("--work", type=Path, default=Path("runs/index-benchmark"))
    given = options.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    words = [word for line in given.sentences.open(encoding="utf-8") for word in lexical_words(line)]
    source, encoder = given.work / "texts.txt", f"hashed-words:{given.size}"
    with source.open("w", encoding="utf-8") as stream:
        stream.writelines(_texts(words, given.texts, given.seed))
    embeddings = given.work / "vectors.npy"
    embedded = _declutr("embed", encoder, str(source), "--output", str(embeddings), "--workers", "0")
    progress(f"embedded: {embedded}")
    rows = []
    for dtype in ("float32", "int8"):
        for hybrid in (False, True):
            folder = given.work / f"{dtype}{'-hybrid' if hybrid else ''}"
            asked = ["--dtype", dtype, *(["--hybrid"] if hybrid else [])]
            built = _declutr("index", str(embeddings), "--output", str(folder), *asked)
            rows.append({"dtype": dtype, "hybrid": hybrid} | built | _searched(folder, encoder, words, given.seed))
            progress(str(rows[-1]))
    told = {"texts": given.texts, "size": given.size, "words_per_text": _WORDS_PER_TEXT}
    publish(facts("evaluate.index", given.commit) | told | {"rows": rows}, given.json)


def _texts(words: list[str], count: int, seed: int, length: int = _WORDS_PER_TEXT) -> Iterator[str]:
    """Lines of words, each drawn by (seed, "index benchmark", text)."""
    for start in range(0, count, _CHUNK_TEXTS):
        keys = np.arange(start, min(start + _CHUNK_TEXTS, count), dtype=np.uint64)
        drawn = seeding.unit(seeding.words(seed, "index benchmark", keys, np.zeros_like(keys), length))
        for row in (drawn * len(words)).astype(np.int64).tolist():
            yield " ".join(words[place] for place in row) + "\n"


def _declutr(*arguments: str) -> dict[str, Any]:
    """Run a command in its own process; return its wall seconds and peak memory."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "declutr.cli.main", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"declutr {arguments[0]} failed with status {process.returncode}")
    return {"seconds": round(time.perf_counter() - started, 1), "peak_mib": round(usage.ru_maxrss / 1024)}


def _searched(folder: Path, encoder: str, words: list[str], seed: int) -> dict[str, Any]:
    """Bytes of an index, seconds to open it, and the median seconds of a query."""
    started = time.perf_counter()
    index = SearchIndex(folder)
    opened = time.perf_counter() - started
    loaded = load_encoder(encoder, device="cpu")
    seconds = []
    for query in _texts(words, _QUERIES, seed + 1, _QUERY_WORDS):
        started = time.perf_counter()
        index.search(loaded, query)
        seconds.append(time.perf_counter() - started)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    told: dict[str, Any] = {"bytes": sizes, "total_bytes": sum(sizes.values()), "recall@10": index.facts.recall}
    return told | {"open_seconds": round(opened, 2), "query_seconds": round(float(np.median(seconds)), 4)}


if __name__ == "__main__":
    main()
