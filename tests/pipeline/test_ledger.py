import gzip
import json

import pytest

from declutr.pipeline.shards.ledger import Entry, LedgerWriter, find_entries, ledger_entries, rejected_writer


def entry(number: int, **changes) -> Entry:
    values = {
        "id": number.to_bytes(16, "big"),
        "source": f"part-{number % 3}.jsonl",
        "offset": number * 10,
        "text_bytes": number,
        "num_tokens": number,
        "language": None,
        "status": "train",
        "row": number,
        "detail": None,
    }
    return Entry(**(values | changes))


@pytest.fixture
def folder(tmp_path):
    failed = entry(25_001, id=None, status="invalid_utf8", row=None, num_tokens=None, detail="byte 3")
    with LedgerWriter(tmp_path, "00000") as ledger:
        for number in range(25_000):
            ledger.add(entry(number))
        ledger.add(failed)
    with LedgerWriter(tmp_path, "00001"):
        pass
    assert ledger.result().num_rows == 25_001
    return tmp_path, failed


def test_a_ledger_comes_back_as_it_was_written(folder):
    path, failed = folder
    assert list(ledger_entries(path / "ledger" / "00000.arrow")) == [*(entry(n) for n in range(25_000)), failed]
    assert list(ledger_entries(path / "ledger" / "00001.arrow")) == []


@pytest.mark.parametrize(
    ("wanted", "ordinals"),
    [
        ((12_345).to_bytes(16, "big").hex(), [12_345]),
        ((12_345).to_bytes(16, "big").hex().upper(), [12_345]),
        ((0).to_bytes(15, "big").hex(), list(range(256))),
        ("part-2.jsonl:50", [5]),
        ("part-1.jsonl:50", []),
        ("part-2.jsonl:250010", [25_000]),
        ("part-9.jsonl", []),
        ("00", []),
    ],
)
def test_documents_are_found_by_id_beginning_of_an_id_or_place(folder, wanted, ordinals):
    found = list(find_entries(folder[0], wanted))
    assert [ordinal for _, ordinal, _ in found] == ordinals
    assert all(unit == "00000" for unit, _, _ in found)


def test_eight_digits_of_an_id_are_enough(tmp_path):
    with LedgerWriter(tmp_path, "00000") as ledger:
        for number in (0xAB, 0xCD):
            ledger.add(entry(number, id=bytes([number]) * 16))
    for wanted, ordinals in (("cdcdcdcd", [1]), ("cdcdcd", [])):
        assert [ordinal for _, ordinal, _ in find_entries(tmp_path, wanted)] == ordinals


def test_documents_are_found_by_source(folder):
    assert sum(1 for _ in find_entries(folder[0], "part-0.jsonl")) == len(range(0, 25_000, 3))


def test_a_ledger_whose_writer_fails_is_absent(tmp_path):
    def fail() -> None:
        with LedgerWriter(tmp_path, "00000") as ledger:
            ledger.add(entry(1))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list((tmp_path / "ledger").iterdir()) == []


def test_rejected_documents_are_written_with_their_reason_and_equal_ones_give_equal_bytes(tmp_path):
    for name in ("a", "b"):
        with rejected_writer(tmp_path / name, "00000", enabled=True) as rejected:
            rejected(entry(1, status="too_short", row=None), "grüße")
    paths = [tmp_path / name / "rejected" / "00000.jsonl.gz" for name in ("a", "b")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_bytes()[4:8] == bytes(4), "the time in the header of a gzip file"
    (line,) = gzip.decompress(paths[0].read_bytes()).splitlines()
    assert json.loads(line) == {
        "id": (1).to_bytes(16, "big").hex(),
        "source": "part-1.jsonl",
        "offset": 10,
        "reason": "too_short",
        "detail": None,
        "text": "grüße",
    }


def test_rejected_documents_are_not_written_when_nobody_asks(tmp_path):
    with rejected_writer(tmp_path, "00000", enabled=False) as rejected:
        rejected(entry(1), "text")
    assert not (tmp_path / "rejected").exists()
