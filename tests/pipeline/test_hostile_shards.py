"""Shards whose numbers point beyond their data: named by the full check and by whoever reads them, never a crash."""

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from messages import all_of
from shardfolders import write

from declutr.common.errors import ShardError
from declutr.common.storage import hash_file
from declutr.pipeline.shards.manifest import load_manifest
from declutr.pipeline.shards.shards import ShardSet

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


def poke(column, place, changed):
    """Changes numbers of the first record batch where they lie in the file."""
    which, dtype = place
    dtype = dtype or (np.uint16 if column == "tokens" else np.int32)

    def change(raw):
        whole = pa.py_buffer(raw)
        buffer = pa.ipc.open_file(whole).get_batch(0).column(column).buffers()[which]
        start = buffer.address - whole.address
        numbers = np.frombuffer(raw, dtype, buffer.size // np.dtype(dtype).itemsize, start)
        for at, number in changed.items():
            numbers[at] = number
        return raw

    return change


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


def spoil(folder, change):
    """Changes the second shard, and the manifest so that it agrees."""
    path = folder / "train-00001.arrow"
    path.write_bytes(change(bytearray(path.read_bytes())))
    manifest = load_manifest(folder)
    facts = {"num_bytes": path.stat().st_size, "sha256": hash_file(path)}
    shards = [shard.model_copy(update=facts if shard.name == path.name else {}) for shard in manifest.shards]
    (folder / "manifest.json").write_text(manifest.model_copy(update={"shards": shards}).model_dump_json())


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What a process of its own says of every folder, by folder and call."""
    root = tmp_path_factory.mktemp("hostile")
    for name, (change, _) in DAMAGE.items():
        spoil(write(root / name), change)
    done = subprocess.run([sys.executable, "-c", READ, str(root), *DAMAGE], capture_output=True, text=True, check=False)
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
