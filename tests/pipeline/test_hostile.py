"""Files and shards that are damaged or lie: read to the end, counted or named, and never a crash."""

import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import COMPRESSORS
from damage import damaged
from messages import all_of
from processes import run_python
from shardfolders import poke, spoil, write

from declutr.common.errors import ShardError
from declutr.pipeline.job.units import plan_units, read_unit
from declutr.pipeline.readers.corpus import ReadFailure
from declutr.pipeline.shards.content import TRIPLE_LABELS
from declutr.pipeline.shards.shards import ShardSet
from declutr.pipeline.texts.text_rows import Rejected, TextRow

READ = """
import json, sys
from pathlib import Path
import numpy as np
from declutr.pipeline.shards.shards import ShardError, ShardSet, check_shards
for name in sys.argv[2:]:
    folder = Path(sys.argv[1]) / name
    try:
        print(json.dumps([name, "full", check_shards(folder, full=True)]), flush=True)
        shards = ShardSet(folder, "train")
        shards.take(np.arange(shards.num_documents)[::-1])
    except ShardError as error:
        print(json.dumps([name, "take", str(error)]), flush=True)
"""


OFFSETS, VALUES, NUMBERS = (1, np.int32), (3, None), (1, np.int64)  # a buffer of a column, and what it holds


def swap(column, make):
    """Writes the shard anew with another column in its record batches; None: without it."""

    def change(raw):
        reader = pa.ipc.open_file(pa.py_buffer(raw))
        tables = [pa.Table.from_batches([reader.get_batch(number)]) for number in range(reader.num_record_batches)]
        sink = pa.BufferOutputStream()
        for number, table in enumerate(tables):
            found = None if make is None else make(table.column(column))
            rest = table.drop_columns([column])
            new = rest if found is None else rest.append_column(column, found)
            if number == 0:
                writer = pa.ipc.new_file(sink, new.schema)
            writer.write_table(new)
        writer.close()
        return sink.getvalue().to_pybytes()

    return change


def without_first(column):
    return pa.array([None, *column.to_pylist()[1:]], column.type)


def without_tokens(column):
    return pa.array([[None, *row[1:]] for row in column.to_pylist()], column.type)


DAMAGE = {
    "tokens beyond the data": (poke("tokens", OFFSETS, {5: 2**30}), "document 0"),
    "tokens in the middle beyond the data": (poke("tokens", OFFSETS, {2: 2**30}), "document 0"),
    "tokens before the data": (poke("tokens", OFFSETS, {0: -(2**20)}), "document 0"),
    "tokens backwards": (poke("tokens", OFFSETS, {1: 12, 2: 3}), "document 0"),
    "windows beyond the data": (poke("windows", OFFSETS, {3: 2**28}), "document 0"),
    "a source beyond the data": (poke("source", OFFSETS, {2: 2**30}), "document 0"),
    "a window beyond the document": (poke("windows", VALUES, {1: 4000}), "starts at 4000, not at 4"),
    "a window before the document": (poke("windows", VALUES, {0: -4}), "starts at -4, not at 0"),
    "windows of another document": (poke("windows", OFFSETS, {1: 2}), "windows, but its"),
    "more tokens said than there are": (poke("num_tokens", NUMBERS, {0: 900}), "num_tokens = 900, but it has 14"),
    "fewer tokens said than there are": (poke("num_tokens", NUMBERS, {0: 9}), "num_tokens = 9, but it has 14"),
    "a token beyond the vocabulary": (poke("tokens", VALUES, {16: 1000}), "document 1: token id 1000 is beyond"),
    "no number of tokens": (swap("num_tokens", without_first), "num_tokens holds nulls"),
    "no token": (swap("tokens", without_tokens), "tokens holds nulls"),
    "tokens of another type": (swap("tokens", lambda column: column.cast(pa.list_(pa.float32()))), "tokens holds list"),
    "a column that is missing": (swap("windows", None), "columns are id, tokens, num_tokens"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What a process of its own says of every folder, by folder and call."""
    root = tmp_path_factory.mktemp("hostile")
    for name, (change, _) in DAMAGE.items():
        spoil(write(root / name), change)
    done = run_python("-c", READ, root, *DAMAGE, check=False)
    found = {}
    for line in done.stdout.splitlines():
        name, call, answer = json.loads(line)
        found[name, call] = answer
    return found, done.returncode, done.stderr


@pytest.mark.parametrize("name", DAMAGE)
def test_hostile_shard_is_named_by_check_and_reader(answers, name):
    found, status, errors = answers
    assert status == 0, f"ended with {status} after {len(found)} answers: {errors}"
    (problem,) = found[name, "full"]
    for told in (problem, found[name, "take"]):
        assert "train-00001.arrow" in told
        assert DAMAGE[name][1] in told


def test_the_other_shards_can_be_read(tmp_path):
    folder = write(tmp_path / "out")
    spoil(folder, DAMAGE["tokens beyond the data"][0])
    shards = ShardSet(folder, "train")
    assert shards.take(np.array([0, 18, 24, 56])).num_rows == 4
    with pytest.raises(ShardError, match=all_of("train-00001.arrow", "document 0")):
        shards.take(np.array([0, 19]))


INPUTS = 1500


@pytest.mark.slow
def test_damaged_files_of_every_kind_are_read_to_the_end():
    ran = run_python("tests/fuzz/readers.py", "--inputs", INPUTS, "--seed", 1, check=False)
    result = json.loads(ran.stdout)
    assert result["errors"] == []
    assert sum(result["kinds"].values()) == INPUTS
    assert result["records"]["document"] > INPUTS
    assert result["records"]["unreadable"] > INPUTS / 10
    assert result["peak_mib"] < 1500


_ROWS = [(f"Premise {n // 3}, it is.", f'Hypothesis "{n}".', n % 3) for n in range(30)]


def _table(dictionary):
    columns = [pa.array(column) for column in zip(*_ROWS, strict=True)]
    columns[:2] = [column.dictionary_encode() for column in columns[:2]] if dictionary else columns[:2]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, ["premise", "hypothesis", "label"]), sink, row_group_size=10)
    return sink.getvalue().to_pybytes()


def _delimited(delimiter):
    quoted = [[str(value).replace('"', '""') for value in row] for row in _ROWS]
    lines = [delimiter.join(f'"{value}"' for value in row) for row in quoted]
    return "\n".join([delimiter.join(("premise", "hypothesis", "label")), *lines]).encode()


TRIPLES = {"kind": "triples", "premise": "premise", "entailment": "hypothesis", "contradiction": "label"}
BASES = {
    "jsonl": b"\n".join(
        f'{{"premise": "{p}", "hypothesis": "{h[:11]}", "label": {label}}}'.encode() for p, h, label in _ROWS
    ),
    "csv": _delimited(","),
    "tsv": _delimited("\t"),
    "parquet": _table(dictionary=False),
    "dictionary.parquet": _table(dictionary=True),
}


@pytest.mark.parametrize("kind", ["pairs", "triples"])
@pytest.mark.parametrize("base", BASES)
def test_damaged_files_are_read_to_the_end(base, kind, tmp_path, make_texts):
    content = {"kind": kind} if kind == "pairs" else TRIPLES
    rows = failures = 0
    for number in range(120):
        chance = random.Random(f"{base}/{kind}/{number}")
        suffix = chance.choice([None, None, *COMPRESSORS])
        data = damaged(BASES[base], chance)
        path = tmp_path / (f"x.{base}.{suffix}" if suffix else f"x.{base}")
        path.write_bytes(COMPRESSORS[suffix](data) if suffix else data)
        config = make_texts(content, path)
        units, _ = plan_units(config.corpus, 0.001, None, config.content)
        premises = []
        for unit in units:
            for record in read_unit(unit, config.corpus, config.content):
                assert isinstance(record, TextRow | Rejected | ReadFailure)
                assert record.source == path.name
                failures += isinstance(record, ReadFailure)
                if isinstance(record, TextRow):
                    rows += 1
                    assert all(text.strip() for text in record.texts)
                    assert len(record.texts) == len(record.labels) >= 2
                    assert record.labels == TRIPLE_LABELS if kind == "triples" else set(record.labels[1:]) <= {0, 1, 2}
                    premises.append(" ".join(record.texts[0].split()))
                    record.text.encode()
        assert kind == "triples" or len(premises) == len(set(premises))
        path.unlink()
    assert kind == "triples" or rows > 200
    assert failures > 20
