"""Shards, their windows and their ledgers come back as they were written, and are whole or refused."""

import json
import os
import pickle
import time
from dataclasses import replace

import numpy as np
import psutil
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import all_of, says
from shardfolders import GEOMETRY, LENGTHS, TOKENIZER, tokens_of, write

from declutr.cli.main import main
from declutr.common.errors import ShardError
from declutr.pipeline.readers.corpus import document_id
from declutr.pipeline.shards import windows as window_module
from declutr.pipeline.shards.ledger import Entry, LedgerFile, LedgerWriter, ledger_entries
from declutr.pipeline.shards.lookup import find_entries
from declutr.pipeline.shards.manifest import Counts, Shard, Sidecar, build_manifest, data_hash, sum_counts
from declutr.pipeline.shards.shards import ShardSet, check_shards, load_manifest
from declutr.pipeline.shards.windows import Geometry, document_windows, drop_reason, limit_in_words, shortest_document
from declutr.pipeline.shards.writer import ShardWriter, geometry_of, shard_schema


@pytest.mark.parametrize(("vocab_size", "token_type"), [(65536, pa.uint16()), (65537, pa.uint32())])
def test_any_documents_come_back_in_the_order_asked(tmp_path, vocab_size, token_type):
    folder = write(tmp_path / "out", vocab_size)
    shards = pickle.loads(pickle.dumps(ShardSet(folder, "train")))
    assert (shards.num_documents, ShardSet(folder, "held-out").num_documents) == (57, 0)
    assert shards.take(np.array([], dtype=np.int64)).num_rows == 0
    for row in (-1, 57):
        with pytest.raises(IndexError, match=r"outside 0\.\.56"):
            shards.take(np.array([row]))
    rows = np.random.default_rng(0).integers(0, 57, 200)
    table = shards.take(rows)
    assert table.schema.field("tokens").type == pa.list_(token_type)
    assert all(column.num_chunks == 1 for column in table.columns)
    assert table.column("offset").to_pylist() == rows.tolist()
    for row, values in zip(rows, table.to_pylist(), strict=True):
        assert (values["num_tokens"], values["id"]) == (LENGTHS[row], document_id(b"%d" % row))
        assert values["tokens"] == tokens_of(row, vocab_size).tolist()
        assert values["windows"] == list(range(0, LENGTHS[row] // 4 * 4, 4))


def test_shards_of_other_sizes_numbers_or_bytes_than_in_the_manifest_are_named(tmp_path, capsys):
    folder = write(tmp_path / "out")
    path = folder / "train-00001.arrow"
    whole, size = path.read_bytes(), path.stat().st_size
    path.write_bytes(whole + b"x" * 7)
    says(*check_shards(folder), "train-00001.arrow", "changed", f"{size + 7} bytes", size)
    path.write_bytes(whole)
    rewrite_manifest(folder, 1, num_documents=18)
    says(*check_shards(folder), "train-00001.arrow", "19 documents", "18")
    path.write_bytes(whole[:-100])
    (folder / "train-00002.arrow").unlink()
    truncated, missing = check_shards(folder)
    says(truncated, "train-00001.arrow", "truncated", f"{size - 100} bytes", size)
    says(missing, "train-00002.arrow", "missing")
    with pytest.raises(ShardError, match=all_of("train-00001.arrow", "truncated")):
        ShardSet(folder, "train")
    assert main(["inspect", str(folder)]) == 1
    shown = capsys.readouterr()
    says(shown.out, "PROBLEM", "train-00001.arrow")
    says(shown.out, "PROBLEM", "tokenizer is missing")
    says(shown.err, f"{folder}: problems, named above: 3")
    folder = write(tmp_path / "other")
    path = folder / "train-00001.arrow"
    data = bytearray(path.read_bytes())
    at = bytes(data).index(np.array(tokens_of(19)[1:6], dtype=np.uint16).tobytes())
    data[at : at + 2] = b"\xff\xff"
    written = path.stat()
    path.write_bytes(data)
    assert any("SHA-256" in problem for problem in check_shards(folder)), "it is newer than the manifest"
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    assert check_shards(folder) == []
    damaged, beyond = check_shards(folder, full=True)
    assert "SHA-256" in damaged
    says(beyond, "token id 65535", "1000")
    path.write_bytes(b"x" * len(data))
    says(check_shards(folder)[0], "not an Arrow")


def rewrite_manifest(folder, shard, **changes):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][shard] |= changes
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("absolute", [False, True])
def test_a_shard_outside_the_folder_is_not_read(tmp_path, absolute):
    """A manifest is data of somebody else: its names stay inside its folder, also where the file there is sound."""
    write(tmp_path / "elsewhere")
    folder, name = write(tmp_path / "out"), f"{tmp_path if absolute else '..'}/elsewhere/train-00000.arrow"
    rewrite_manifest(folder, 0, name=name)
    says(*check_shards(folder), name, "outside")
    with pytest.raises(ShardError, match="outside its folder"):
        ShardSet(folder, "train")
    with pytest.raises(ShardError, match="outside its folder"):
        ShardSet(folder, "train", look=False).take(np.arange(57))


def test_a_token_beyond_the_vocabulary_leaves_neither_shard_nor_ledger(tmp_path):
    schema = shard_schema(10, GEOMETRY, "f")

    def write_two():
        with LedgerWriter(tmp_path, "00000") as ledger, ShardWriter(tmp_path, "00000", "train", schema, 1) as writer:
            ledger.add(entry(1))
            writer.add(b"0" * 16, np.array([9], dtype=np.uint32), "s", 6)
            writer.add(b"0" * 16, np.array([10], dtype=np.uint32), "s", 7)

    with pytest.raises(ShardError, match=all_of("7", "token id 10", "of 10")):
        write_two()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_totals_close_and_counts_of_many_units_are_summed_in_linear_time():
    counts = Counts(read=3, kept=1, dropped={"empty": 1}, failed={}, text_bytes=0, longest_tokens=1)
    with pytest.raises(ShardError, match=all_of("3 documents", "2")):
        counts.check("unit")
    counts.model_copy(update={"failed": {"invalid_utf8": 1}}).check("unit")
    units = [Counts(read=0, kept=0, dropped={}, failed={}, text_bytes=3, longest_tokens=n) for n in (7, 20, 5)]
    assert (sum_counts(units).longest_tokens, sum_counts(units).text_bytes) == (20, 9)
    units = [Counts(labels={f"label {n}": 1, "other": n % 2}) for n in range(6_000)]
    started = time.monotonic()
    labels = sum_counts(units).labels
    assert time.monotonic() - started < 4, "more than 10 s, were the sum copied for every unit"
    assert (labels, list(labels)) == ({f"label {n}": 1 for n in range(6_000)} | {"other": 3_000}, sorted(labels))


@pytest.mark.parametrize("version", [0, 2])
def test_a_manifest_that_is_absent_or_of_another_version(tmp_path, version):
    with pytest.raises(ShardError, match=all_of("no manifest.json")):
        load_manifest(tmp_path)
    folder = write(tmp_path / "out")
    tree = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(tree | {"schema_version": version}))
    for read in (load_manifest, lambda folder: ShardSet(folder, "train")):
        with pytest.raises(ShardError, match=all_of("schema version", version)):
            read(folder)


def test_more_shards_than_may_be_open(tmp_path):
    shards = ShardSet(write(tmp_path / "out"), "train", look=False, most_open=2)
    rows = np.random.default_rng(0).integers(0, 57, 200)
    for part in np.split(rows, 20):
        assert shards.take(part).column("offset").to_pylist() == part.tolist()
        mapped = {place.path for place in psutil.Process().memory_maps()}
        assert len([path for path in mapped if path.startswith(str(tmp_path))]) <= 2
    folder = write(tmp_path / "out")
    (folder / "train-00001.arrow").unlink()
    shards = ShardSet(folder, "train", look=False)
    assert shards.take(np.array([0, 18, 38])).num_rows == 3
    with pytest.raises(ShardError, match=all_of("train-00001.arrow", "missing")):
        shards.take(np.array([19]))


def test_the_identity_of_data_is_that_of_shards_tokenizer_and_geometry_and_a_shard_explains_itself(tmp_path):
    folder = write(tmp_path / "out")
    manifest = load_manifest(folder)
    first, *others = manifest.shards
    changes = [{"geometry": GEOMETRY.model_copy(update={name: 5})} for name in ("max_tokens", "num_anchors")]
    changes += [{"shards": [replace(first, sha256="0"), *others]}, {"shards": others}, {"tokenizer": None}]
    changes += [{"shards": [replace(first, name="train-00009.arrow"), *others]}]
    changes += [{"tokenizer": manifest.tokenizer.model_copy(update={"fingerprint": "0"})}]
    assert len({data_hash(manifest.model_copy(update=change)) for change in [{}, *changes]}) == 1 + len(changes)
    assert data_hash(manifest.model_copy(update={"versions": {}, "config_hash": "0"})) == data_hash(manifest)
    reversed_ = manifest.model_copy(update={"shards": manifest.shards[::-1]})
    (folder / "manifest.json").write_text(reversed_.model_dump_json())
    assert ShardSet(folder, "train").take(np.arange(57)).column("offset").to_pylist() == list(range(57))
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    assert load_manifest(first) == load_manifest(second)
    metadata = pa.ipc.open_file(str(first / "train-00000.arrow")).schema.metadata
    facts = {"schema_version": "1", "tokenizer_fingerprint": TOKENIZER.fingerprint, "vocab_size": "1000"}
    facts |= {"num_anchors": "1", "max_tokens": "4"}
    assert {key.decode(): value.decode() for key, value in metadata.items()} == facts
    assert check_shards(first, full=True) == []


def test_the_copy_of_a_reader_for_another_process_has_no_ledgers_and_labels(tmp_path):
    folder = write(tmp_path / "out")
    manifest, small = load_manifest(folder), len(pickle.dumps(ShardSet(folder, "train")))
    many = {"ledgers": manifest.ledgers * 1000, "labels": {str(n): n for n in range(1000)}}
    (folder / "manifest.json").write_text(manifest.model_copy(update=many).model_dump_json())
    assert len(pickle.dumps(ShardSet(folder, "train"))) == small
    (folder / "manifest.json").write_text(manifest.model_dump_json().replace('"train-00001.arrow"', "1"))
    with pytest.raises(ShardError, match=all_of("manifest of this version", "shards.1.name")):
        ShardSet(folder, "train")


@pytest.mark.parametrize(("ledger_rows", "documents"), [(18, 19), (20, 19), (19, 18), (19, 20)])
def test_a_manifest_is_refused_if_ledgers_or_shards_have_too_few_rows_or_too_many(ledger_rows, documents):
    facts = {"num_bytes": 1, "sha256": ""}
    ledger = LedgerFile(name="ledger/00000.arrow", num_rows=ledger_rows, **facts)
    shard = Shard(name="train-00000.arrow", split="train", num_documents=documents, num_tokens=1, **facts)
    counts = Counts(read=19, kept=19, dropped={}, failed={}, text_bytes=0, longest_tokens=20)
    facts = {"unit": "00000", "unit_hash": "", "config_hash": "", "num_bytes": 1, "failures": []}
    sidecar = Sidecar(counts=counts, ledger=ledger, shards=[shard], **facts)
    with pytest.raises(ShardError, match=all_of("19 documents", min({ledger_rows, documents} - {19}))):
        build_manifest([sidecar], TOKENIZER, GEOMETRY, {}, "")


def test_part_of_a_corpus_is_a_function_of_seed_and_id_and_grows_with_its_share(tmp_path):
    folders = [write(tmp_path / str(units), units=units) for units in (3, 2)]
    whole, fewer = (ShardSet(folder, "train") for folder in folders)

    def offsets(shards):
        return set(shards.take(np.arange(shards.num_documents)).column("offset").to_pylist())

    parts = {share: ShardSet(folders[0], "train", part=(share, 7)) for share in (0.1, 0.4, 0.8, 1.0)}
    chosen = {share: offsets(pickle.loads(pickle.dumps(part))) for share, part in parts.items()}
    assert chosen[0.1] < chosen[0.4] < chosen[0.8] < chosen[1.0] == offsets(whole)
    assert abs(len(chosen[0.4]) - 0.4 * 57) < 12
    assert offsets(ShardSet(folders[1], "train", part=(0.4, 7))) == chosen[0.4] & offsets(fewer)
    assert offsets(ShardSet(folders[0], "train", part=(0.4, 8))) != chosen[0.4]
    part = parts[0.4]
    assert part.take(np.array([1, 0, 1])).column("offset").to_pylist() == [sorted(chosen[0.4])[k] for k in (1, 0, 1)]
    with pytest.raises(IndexError, match="outside"):
        part.take(np.array([part.num_documents]))


def entry(number: int, **changes) -> Entry:
    values = {"id": number.to_bytes(16, "big"), "source": f"part-{number % 3}.jsonl", "offset": number * 10}
    values |= {"text_bytes": number, "num_tokens": number, "language": None, "status": "train", "row": number}
    return Entry(**(values | {"detail": None} | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("ledgers")
    failed = entry(25_001, id=None, status="invalid_utf8", row=None, num_tokens=None, detail="byte 3")
    rows = [*map(entry, range(25_000)), failed, entry(25_002, id=b"\xcd" * 16)]
    with LedgerWriter(tmp_path, "00000") as ledger, LedgerWriter(tmp_path, "00001"):
        for row in rows:
            ledger.add(row)
    assert ledger.result().num_rows == 25_002
    return tmp_path, rows


def test_a_ledger_comes_back_and_documents_are_found_by_id_beginning_of_an_id_or_place(folder):
    path, rows = folder
    for name, expected in (("00000", rows), ("00001", [])):
        assert list(ledger_entries(path / "ledger" / f"{name}.arrow")) == expected
    ordinals = {f"{12_345:032x}": [12_345], f"{12_345:032X}": [12_345], f"{0:030x}": list(range(256))}
    ordinals |= {"part-2.jsonl:50": [5], "part-1.jsonl:50": [], "part-2.jsonl:250010": [25_000], "part-9.jsonl": []}
    ordinals |= {"part-0.jsonl": [*range(0, 25_000, 3), 25_001], "cdcdcdcd": [25_001], "cdcdcd": []}
    for document, expected in ordinals.items():
        places = [(unit, ordinal) for unit, ordinal, _ in find_entries(path, document)]
        assert places == [("00000", ordinal) for ordinal in expected], document


MODES, SIZES = st.sampled_from(["drop", "fewer_anchors", "shrink_spans"]), (st.integers(2, 600), st.integers(0, 600))


@given(MODES, st.integers(1, 5), *SIZES, st.integers(1, 7_000))
def test_every_mode_keeps_what_has_room(mode, num_anchors, max_tokens, less, num_tokens):
    """fewer_anchors: for one anchor. shrink_spans: for all of them, in windows of at least min_tokens."""
    geometry = Geometry(num_anchors=num_anchors, max_tokens=max_tokens, min_tokens=max(1, max_tokens - less))
    longest = window_module.window_tokens(num_tokens, geometry, mode)
    room = num_tokens // (2 * longest) if longest else 0
    enough = room >= (1 if mode == "fewer_anchors" else geometry.num_anchors)
    if mode == "shrink_spans":
        enough = enough and longest >= geometry.min_tokens
    assert (drop_reason(num_tokens, geometry, mode) is None) == enough
    assert drop_reason(num_tokens, geometry, mode) in (None, "too_short")
    if enough:
        windows = document_windows(num_tokens, geometry, mode)
        assert (windows.dtype, windows.tolist()) == (np.int32, [k * longest for k in range(num_tokens // longest)])
        assert longest == geometry.max_tokens or (mode == "shrink_spans" and num_tokens < shortest_document(geometry))


SHORTEST = [("drop", 2048, "num_anchors (2);max_tokens (512)"), ("fewer_anchors", 1024, "max_tokens (512)")]
SHORTEST += [("shrink_spans", 128, "num_anchors (2);min_tokens (32)")]


@pytest.mark.parametrize(("mode", "shortest", "words"), SHORTEST)
def test_shortest_document_of_the_papers_geometry_follows_from_the_mode(mode, shortest, words):
    geometry = Geometry()
    assert shortest_document(geometry, mode) == shortest
    says(limit_in_words(geometry, mode), f"= {shortest}", *(f"geometry.{name}" for name in words.split(";")))
    assert drop_reason(shortest, geometry, mode) is None
    assert (drop_reason(shortest - 1, geometry, mode), drop_reason(0, geometry, mode)) == ("too_short", "empty")
    other = Geometry(num_anchors=3, max_tokens=64, min_tokens=32)
    assert geometry_of(shard_schema(10, other, "f", mode)) == (other, mode)
