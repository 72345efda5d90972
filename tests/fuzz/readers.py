"""A fuzzer of the readers: small files of every kind, damaged at random, read to the end.

    python tests/fuzz/readers.py --inputs 100000 --seed 0

Input i of a seed is always the same bytes. They are read in another process, so that a crash of a C library or a hang
is seen, and named by its input: `--only I` reads that one alone in this process.
"""

import argparse
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from corpora import COMPRESSORS, files
from damage import BASES, PAIRS, damaged
from pydantic import TypeAdapter

from declutr.pipeline.job.units import plan_units, read_unit
from declutr.pipeline.readers.corpus import Document, ReadFailure, Rejected
from declutr.pipeline.shards.content import TRIPLE_LABELS, AnyContent
from declutr.pipeline.texts import TextRow

SECONDS_PER_INPUT = 10
_UNITS_MIB = (64.0, 0.001)
CONTENTS = {"documents": {"kind": "documents"}, "pairs": {"kind": "pairs"}}
CONTENTS |= {"triples": {"kind": "triples", "premise": "premise", "entailment": "hypothesis", "contradiction": "label"}}
KINDS = [
    (content, base, suffix)
    for content in CONTENTS
    for base in (BASES if content == "documents" else PAIRS)
    for suffix in (None, *COMPRESSORS)
]


def make(seed: int, number: int) -> tuple[str, str, str | None, bytes, bytes | None]:
    """Input `number`: its content, format and compression, its bytes, and those before compression if undamaged."""
    chance = random.Random(f"{seed}/{number}")
    content, base, suffix = KINDS[number % len(KINDS)]
    data = (BASES if content == "documents" else PAIRS)[base]
    if suffix is None:
        data = damaged(data, chance)
        return content, base, suffix, data, data
    if chance.random() < 0.5:
        data = damaged(data, chance)
        return content, base, suffix, COMPRESSORS[suffix](data), data
    return content, base, suffix, damaged(COMPRESSORS[suffix](data), chance), None


def read(seed: int, number: int, folder: Path) -> Counter[str]:
    """Reads one input in large and in small units, checks what must hold for any bytes, counts the records."""
    name, base, suffix, data, plain = make(seed, number)
    path = folder / (f"x.{base}.{suffix}" if suffix else f"x.{base}")
    path.write_bytes(data)
    corpus, content = files(path, max_document_mib=0.001), TypeAdapter(AnyContent).validate_python(CONTENTS[name])
    found = []
    for unit_mib in _UNITS_MIB:
        units, problems = plan_units(corpus, unit_mib, None, content)
        records = []
        for unit in units:
            reader = read_unit(unit, corpus, content)
            records += list(reader)
            assert reader.bytes_read == unit.num_bytes, "bytes_read is not all of the input"
        for record in records:
            assert isinstance(record, Document | ReadFailure)
            assert record.source == path.name or record.source.startswith(f"{path.name}!"), record.source
            assert record.offset >= 0
            if isinstance(record, Document):
                record.text.encode()
        if name != "documents":
            _check_rows(records, name)
        assert records or problems or _may_be_empty(base, data, plain), "nothing read and nothing said"
        found.append(records)
    if name == "documents" and base in ("jsonl", "txt"):
        _check_lines(*found, plain, base)
    return Counter(getattr(record, "reason", type(record).__name__.lower()) for record in found[0])


def _check_rows(records: list, name: str) -> None:
    """Pairs are grouped by premise, no text of a row is blank, and labels are in order."""
    rows = [record for record in records if isinstance(record, TextRow)]
    assert all(isinstance(record, TextRow | Rejected | ReadFailure) for record in records)
    for row in rows:
        assert all(text.strip() for text in row.texts)
        assert len(row.texts) == len(row.labels) >= 2
        assert row.labels == TRIPLE_LABELS if name == "triples" else set(row.labels[1:]) <= {0, 1, 2}
    premises = [" ".join(row.texts[0].split()) for row in rows]
    assert name == "triples" or len(premises) == len(set(premises))


def _may_be_empty(base: str, data: bytes, plain: bytes | None) -> bool:
    """Whether these bytes can hold no document.

    Nothing at all, no row after a header, an archive without members; an Arrow stream may end between any two messages.
    """
    if not data or "arrow" in base:
        return True
    return plain is not None and (not plain or base not in ("jsonl", "txt"))


def _check_lines(large: list, small: list, plain: bytes | None, base: str) -> None:
    """Every line of what can be read is a record, and units of any size give the same ones."""
    assert large == small, "units of another size give other records"
    if plain is not None and base == "jsonl":  # its lines are shorter than the limit: each is one record
        lines = plain.count(b"\n") + (not plain.endswith(b"\n") and plain != b"")
        assert len(large) == lines or any(len(line) > 1000 for line in plain.split(b"\n")), (len(large), lines)


def read_one(seed: int, number: int) -> tuple[Counter[str], str | None, float, int]:
    """Counts of the records of an input, or an error; seconds, and the largest memory of this process in MiB."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process even inside a C library
    signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_INPUT)
    began, counts, error = time.perf_counter(), Counter[str](), None
    try:
        with tempfile.TemporaryDirectory() as folder:
            counts = read(seed, number, Path(folder))
    except Exception:  # noqa: BLE001 - what the fuzzer is looking for
        error = traceback.format_exc(limit=-4)
    signal.setitimer(signal.ITIMER_REAL, 0)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return counts, error, time.perf_counter() - began, peak_mib


def fuzz(seed: int, inputs: int) -> dict[str, object]:
    """Reads this many inputs in a process, and in a new one after an input that ended it."""
    counts: Counter[str] = Counter()
    kinds = Counter("/".join(filter(None, KINDS[number % len(KINDS)])) for number in range(inputs))
    slowest, peak_mib, errors, pool = (0.0, 0), 0, list[object](), None
    for number in range(inputs):
        pool = pool or ProcessPoolExecutor(1, get_context("spawn"))
        try:
            records, error, seconds, memory = pool.submit(read_one, seed, number).result()
        except BrokenProcessPool:
            records, error, seconds, memory, pool = Counter(), "a crash or a hang: read it with --only", 0.0, 0, None
        counts.update(records)
        slowest, peak_mib = max(slowest, (seconds, number)), max(peak_mib, memory)
        errors += [{"input": number, "error": error}] if error else []
    if pool:
        pool.shutdown()
    return {
        "inputs": inputs,
        "seed": seed,
        "kinds": dict(sorted(kinds.items())),
        "records": dict(counts.most_common()),
        "slowest_seconds": round(slowest[0], 3),
        "slowest_input": slowest[1],
        "peak_mib": peak_mib,
        "errors": errors,
    }


def main() -> int:
    """Prints the figures as JSON; the exit status is 1 if any input crashed, hung or broke a promise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="read this input alone, in this process")
    arguments = parser.parse_args()
    if arguments.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write(f"{read(arguments.seed, arguments.only, Path(folder))}\n")
        return 0
    result = fuzz(arguments.seed, arguments.inputs)
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return int(bool(result["errors"]))


if __name__ == "__main__":
    sys.exit(main())
