"""Damaged files of pairs and triples: every record is a row, a drop or a failure, and a row is whole."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import COMPRESSORS
from damage import damaged

from declutr.pipeline.job.units import plan_units, read_unit
from declutr.pipeline.readers.corpus import ReadFailure
from declutr.pipeline.shards.content import TRIPLE_LABELS
from declutr.pipeline.texts.text_rows import Rejected, TextRow

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
