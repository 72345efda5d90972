"""A fuzzer of the readers: small files of every kind, damaged at random, read to the end.

    python tests/fuzz/readers.py --inputs 100000 --seed 0

Input i of a seed is always the same bytes. Batches run in processes of their own, so that a crash of a C library or a
hang is seen, and named by its input: `--only I` reads that one alone in this process.
"""

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
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
BATCH_INPUTS = 1000
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


def batch(seed: int, start: int, stop: int) -> dict[str, object]:
    """Reads inputs [start, stop) in this process; what it prints before each tells the parent where it died."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process even inside a C library
    counts: Counter[str] = Counter()
    slowest = (0.0, start)
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(start, stop):
            os.write(1, f"{number}\n".encode())
            signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_INPUT)
            began = time.perf_counter()
            try:
                counts.update(read(seed, number, Path(folder)))
            except Exception:  # noqa: BLE001 - what the fuzzer is looking for
                errors.append({"input": number, "error": traceback.format_exc(limit=-4)})
            signal.setitimer(signal.ITIMER_REAL, 0)
            slowest = max(slowest, (time.perf_counter() - began, number))
            for path in Path(folder).iterdir():
                path.unlink()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {"counts": counts, "slowest": slowest, "errors": errors, "peak_mib": peak_mib}


def fuzz(seed: int, inputs: int) -> dict[str, object]:
    """Reads that many inputs in processes of their own, going on behind one that killed its process."""
    counts: Counter[str] = Counter()
    kinds = Counter("/".join(filter(None, KINDS[number % len(KINDS)])) for number in range(inputs))
    slowest = (0.0, 0)
    errors: list[object] = []
    peak_mib = 0
    start = 0
    while start < inputs:
        stop = min(inputs, start + BATCH_INPUTS)
        command = [sys.executable, __file__, "--seed", str(seed), "--batch", str(start), str(stop)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = ran.stdout.splitlines()
        if ran.returncode == 0:
            result = json.loads(lines[-1])
            counts.update(result["counts"])
            slowest = max(slowest, tuple(result["slowest"]))
            errors += result["errors"]
            peak_mib = max(peak_mib, result["peak_mib"])
            start = stop
        else:
            died = int(lines[-1]) if lines else start
            what = "hang" if ran.returncode == -signal.SIGALRM else f"crash, exit status {ran.returncode}"
            errors.append({"input": died, "error": f"{what}\n{ran.stderr[-2000:]}"})
            start = died + 1
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
    parser.add_argument("--batch", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.batch:
        sys.stdout.write("\n" + json.dumps(batch(arguments.seed, *arguments.batch)) + "\n")
        return 0
    if arguments.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write(f"{read(arguments.seed, arguments.only, Path(folder))}\n")
        return 0
    result = fuzz(arguments.seed, arguments.inputs)
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return int(bool(result["errors"]))


if __name__ == "__main__":
    sys.exit(main())
