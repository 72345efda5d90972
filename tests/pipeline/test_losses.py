"""A failure weighs what it lost: files that break off, files of which much failed; inputs of the kinds people have."""

import gzip
import json
from pathlib import Path

import pytest
from corpora import COMPRESSORS, files, outcomes, read_all, tar
from messages import says

from declutr.pipeline.job.outcome import losses_hint, too_many_failed
from declutr.pipeline.job.units import plan_units, read_unit
from declutr.pipeline.readers.corpus import ReadFailure
from declutr.pipeline.shards.ledger import sum_losses
from declutr.pipeline.shards.manifest import Counts

CASES = Path(__file__).parents[3] / "shared" / "cases"


def rows(count, start=0):
    return b"".join(b'{"text": "document %d of many words"}\n' % n for n in range(start, start + count))


def losses_of(path, unit_mib=64.0):
    """Losses over all units, and the counts of records."""
    units, _ = plan_units(files(path), unit_mib)
    readers = [read_unit(unit, files(path)) for unit in units]
    records = [record for reader in readers for record in reader]
    failed = sum(isinstance(record, ReadFailure) for record in records)
    counts = Counts(read=len(records), kept=0, dropped={}, failed={"x": failed}, text_bytes=0, longest_tokens=0)
    return sum_losses(reader.losses for reader in readers), counts


@pytest.mark.parametrize("packing", ["gz", "zst", "member"])
def test_a_file_that_is_cut_short_weighs_like_the_whole_ones(tmp_path, packing):
    for number in range(10):
        data = COMPRESSORS["gz" if packing == "member" else packing](rows(100, 100 * number))
        data = data if number % 5 else data[:40]
        name = f"{number}.jsonl.gz" if packing == "member" else f"{number}.jsonl.{packing}"
        (tmp_path / f"{name}{'.tar' * (packing == 'member')}").write_bytes(
            tar([(name, data)]) if packing == "member" else data
        )
    for unit_mib in (64.0, 0.001):
        losses, counts = losses_of(tmp_path, unit_mib)
        assert losses.num_broken == 2
        assert losses.documents() == pytest.approx(198, abs=2), "two failures are counted already"
        problem = too_many_failed(counts, [], 0.15, "documents", losses)
        says(problem, "about 198 more", "20.00%", "2 of ")
        assert too_many_failed(counts, [], 0.2, "documents", losses) is None


def test_a_file_that_is_damaged_in_its_middle_weighs_by_the_bytes_behind(tmp_path):
    data = bytearray(gzip.compress(b"".join(rows(1000, 1000 * n) for n in range(100)), mtime=0))
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    losses, counts = losses_of(tmp_path)
    assert losses.documents() + counts.read == pytest.approx(100_000, rel=0.3)  # a chunk before the damage is lost too


def test_a_file_of_which_much_failed_is_named_although_it_is_a_small_part_of_the_corpus(tmp_path):
    (tmp_path / "lines.txt").write_text("a line\n" * 23_000)
    (tmp_path / "bad.csv").write_text("id,text\n" + "1,good\n" * 20 + '1,"never" closed\n' * 80)
    (tmp_path / "single.md").write_bytes(b"\xff")
    losses, counts = losses_of(tmp_path)
    assert too_many_failed(counts, [], 0.01, "documents", losses) is None
    (line,) = losses_hint(losses, "documents")
    says(line, "bad.csv", "80 of 100")


QUOTED = {
    "of a page": (b"WARC/1.0\r\nWARC-Type: warcinfo\r\nContent-Length: 3\r\n\r\na:b\r\n\r\n", []),
    "a text": (b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: 6\r\n\r\n\xc3\xa9\nb\n!\r\n\r\n", ["é\nb\n!"]),
    "a page": (b"WARC/1.0\nwarc-type: response\nContent-Length: 4\n\n<p>x\n\n", ["unknown_format"]),
    "no length": (b"WARC/1.0\r\nWARC-Type: conversion\r\n\r\ntext", ["unreadable"]),
    "cut": (b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: 99\r\n\r\ntext", ["unreadable"]),
    "no WARC": (b"<html>", ["unreadable"]),
}


@pytest.mark.parametrize("name", QUOTED)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_texts_of_wet_are_documents_and_pages_failures(tmp_path, name, pack):
    record, expected = QUOTED[name]
    good, texts = QUOTED["a text"]
    path = tmp_path / ("a.wet.gz" if pack is gzip.compress else "a.wet")
    path.write_bytes(pack(good) + pack(record))
    assert [outcome for _, outcome in outcomes(read_all(files(tmp_path)))] == texts + expected


ODD_JSON = {
    "array": (b'[{"text": "a"},\n{"text": "b"}]', ["a", "b"]),
    "pretty": (json.dumps([{"text": "a", "n": [1]}, {"text": "b"}], indent=2).encode(), ["a", "b"]),
    "object": (json.dumps({"n": 1, "text": "a"}, indent=2).encode(), ["a"]),
    "not objects": (b'[{"text": "a"}, 3, null, {"text": NaN}]', ["invalid_json"]),
    "no text": (b'[{"text": "a"}, 3, {"text": 1}]', ["a", "no_text_field", "no_text_field"]),
    "UTF-16": ('[{"text": "é"}]'.encode("utf-16"), ["é"]),
    "cut": (b'[{"text": "a"}, {"te', ["invalid_json"]),
    "long": (b'[{"text": "%s"}]' % (b"word " * 300), ["word " * 204, "word " * 96]),
}


@pytest.mark.parametrize("name", ODD_JSON)
@pytest.mark.parametrize("pack", ["json", "json.gz"])
def test_arrays_and_values_of_several_lines_are_read(tmp_path, name, pack):
    data, expected = ODD_JSON[name]
    (tmp_path / f"a.{pack}").write_bytes(gzip.compress(data) if pack.endswith("gz") else data)
    corpus = files(tmp_path, max_document_mib=1021 / 2**20)
    assert [outcome for _, outcome in outcomes(read_all(corpus))] == expected


def test_every_kind_of_file_of_a_folder_has_its_own_reading(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ndocument")
    (tmp_path / "b.md").write_text("# two\n")
    (tmp_path / "c.csv").write_text("text\nthree\nfour\n")
    corpus = files(tmp_path, format="auto_text_file")
    assert [text for _, text in outcomes(read_all(corpus))] == ["one\n\ndocument", "# two\n", "three", "four"]
    assert len(read_all(files(tmp_path))) == 6


RIGHT = {
    "tsv_open_quote": (40, {}),
    "json_gz_late_key": (30, {}),
    "csv_cr_among_good": (600, {}),
    "shards_cut": (4000, {"unreadable": 10}),
    "hf_saved_map_only": (60, {}),
    "parquet_metadata": (40, {}),
    "json_array": (21, {}),
    "wet": (10, {}),
    "tar_odd/a_gnu_sparse.tar": (5, {"not_a_file": 2}),
}


@pytest.mark.parametrize("case", RIGHT)
def test_inputs_that_once_went_wrong(case):
    if not (CASES / case).exists():
        pytest.skip("the inputs are not here")
    records = read_all(files(CASES / case))
    failed = [record.reason for record in records if isinstance(record, ReadFailure)]
    assert (len(records) - len(failed), {reason: failed.count(reason) for reason in failed}) == RIGHT[case]
