"""NanoBEIR (`--tasks nanobeir`): retrieval tests of 50 queries each from 13 of BEIR's, read from Parquet files.

The files are those of the data sets `zeta-alpha-ai/NanoNAME` at the hub, or of `sentence-transformers/NanoBEIR-en`. No
address is opened. As published, texts are cut at the encoder's limit, scores are cosines, and a document that is its
own query counts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from declutr.common.errors import DataError, suggest
from declutr.common.storage import hash_file, hash_json, write_json, write_text
from declutr.encoders.protocol import SentenceEncoder, in_role, unit_rows
from declutr.evaluation.retrieval.compare import F64, MEASURES, measures
from declutr.evaluation.retrieval.pairs import MOST_BYTES, RetrievalTest

_NAMES = ("ArguAna", "ClimateFEVER", "DBPedia", "FEVER", "FiQA2018", "HotpotQA", "MSMARCO", "NFCorpus", "NQ")
NAMES = tuple(f"Nano{name}" for name in (*_NAMES, "QuoraRetrieval", "SCIDOCS", "SciFact", "Touche2020"))
SET = "nanobeir"
_PARTS = ("corpus", "queries", "qrels")
NDCG = MEASURES.index("ndcg@10")


@dataclass(frozen=True)
class NanoTest:
    """One of the 13 tests, such as NanoNQ."""

    name: str
    test: RetrievalTest
    digest: str  # hash of its files
    left_out: int  # Judgements of documents that are not in its files, which count for nothing


def split_names(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """The tests that some of the words name, in the order of `NAMES`, and the other words."""
    tests_by_word = {name.lower(): (name,) for name in NAMES} | {SET: NAMES}
    nano_words = [word for word in words if word.lower().startswith("nano")]
    if wrong := next((word for word in nano_words if word.lower() not in tests_by_word), None):
        raise DataError(f"--tasks: there is no {wrong!r}{suggest(wrong, [*NAMES, SET])}; {SET} has {', '.join(NAMES)}")
    chosen = {name for word in nano_words for name in tests_by_word[word.lower()]}
    return tuple(name for name in NAMES if name in chosen), [word for word in words if word not in nano_words]


def read_nanobeir(folder: Path, names: Sequence[str]) -> list[NanoTest]:
    """Read tests from `folder/nanobeir`."""
    root = folder / SET
    parts = {name: {part: _files(root, name, part) for part in _PARTS} for name in names}
    lacking = {name: ", ".join(part for part in _PARTS if not parts[name][part]) for name in names}
    if any(lacking.values()):
        listing = ", ".join(f"{name} ({gone})" for name, gone in lacking.items() if gone)
        raise DataError(
            f"{root} lacks the Parquet files of {listing}; the project fetches none, this does: hf download "
            f"zeta-alpha-ai/NAME --repo-type dataset --local-dir {root}/NAME"
        )
    return [_read(name, parts[name]) for name in names]


def _read(name: str, parts: Mapping[str, list[Path]]) -> NanoTest:
    documents, queries = (  # texts that are not empty, by id
        {key: text for key, text in _rows(name, parts[part], ("_id", "text")) if text} for part in ("corpus", "queries")
    )
    numbers = {key: number for number, key in enumerate(documents)}
    judged: dict[str, set[int]] = {}
    left_out = 0
    for query, document in _rows(name, parts["qrels"], ("query-id", "corpus-id")):
        if query in queries and document in numbers:
            judged.setdefault(query, set()).add(numbers[document])
        else:
            left_out += 1  # some data sets judge documents that their files lack
    if not judged:
        raise DataError(f"{name}: none of its {left_out} judgements names a query and a document of its files")
    keys = [key for key in queries if key in judged]
    test = RetrievalTest([queries[key] for key in keys], list(documents.values()), [sorted(judged[k]) for k in keys])
    return NanoTest(name, test, hash_json([hash_file(path) for paths in parts.values() for path in paths]), left_out)


def _files(root: Path, name: str, part: str) -> list[Path]:
    """The files of a part: in a folder of the test, or in one of the part whose splits are the tests."""
    # sorted, because a file system lists a folder in any order
    return sorted((root / name / part).glob("*.parquet")) or sorted((root / part).glob(f"{name}-*.parquet"))


def _rows(name: str, paths: Sequence[Path], columns: tuple[str, str]) -> list[tuple[str, str]]:
    rows = list[tuple[str, str]]()
    for path in paths:
        try:
            if (size := path.stat().st_size) > MOST_BYTES:
                raise DataError(f"{name}: {path} has {size:,} bytes; at most {MOST_BYTES:,} are read")
            table = pq.ParquetFile(path).read(list(columns))
            if missing := [column for column in columns if column not in table.column_names]:
                raise DataError(f"{name}: {path} has no column {' and no column '.join(missing)}")
            kinds = [table.column(column).type for column in columns]
            if not all(pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in kinds):
                raise DataError(
                    f"{name}: {path} has {' and '.join(map(str, kinds))} in {', '.join(columns)}, not texts"
                )
            rows += zip(*(table.column(column).to_pylist() for column in columns), strict=True)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{name}: {path} is not Parquet, or damaged ({error})") from error
    if any(value is None for row in rows for value in row):
        raise DataError(f"{name}: {paths[0].parent} has rows without {' or '.join(columns)}")
    return rows


def overview(tests: Sequence[NanoTest]) -> Iterator[str]:
    """Format a line per test, with what is left out of it."""
    for nano in tests:
        yield f"{nano.name}: {len(nano.test.queries):,} queries, {len(nano.test.texts):,} texts"
        if nano.left_out:
            yield f"{nano.name}: {nano.left_out:,} judgements name no query or document of its files and are left out"


def score_nanobeir(
    encoder: SentenceEncoder, tests: Sequence[NanoTest], sizes: Sequence[int], say: Callable[[str], None]
) -> dict[int, dict[str, F64]]:
    """`(5,)` means of `MEASURES` over the queries of each test, by size of the embedding and name of the test.

    `sizes` are smaller ones; the whole embedding is always scored. `say` receives progress lines.
    """
    means: dict[int, dict[str, F64]] = {size: {} for size in (*sizes, encoder.size)}
    for nano in tests:
        queries = in_role(encoder, "query").encode(nano.test.queries)
        texts = in_role(encoder, "document").encode(nano.test.texts)
        if not (np.isfinite(queries).all() and np.isfinite(texts).all()):
            raise DataError(f"{encoder.name}: {nano.name} has no score, because embeddings are not finite")
        for size, scores in means.items():
            cosines = unit_rows(queries[:, :size]) @ unit_rows(texts[:, :size]).T
            scores[nano.name] = measures(cosines, nano.test.relevant).mean(axis=0)
        say(f"{encoder.name}: {nano.name} nDCG@10 {100 * means[encoder.size][nano.name][NDCG]:.2f}")
    return means


def write_nanobeir(tests: Sequence[NanoTest], scored: dict[str, dict[str, F64]], folder: Path) -> str:
    """Write means by test, by encoder: `nanobeir.json` (all), `nanobeir.md` (nDCG@10, percent); return the table."""
    facts = {
        nano.name: {"queries": len(nano.test.queries), "texts": len(nano.test.texts), "left_out": nano.left_out}
        | {"hash": nano.digest}
        for nano in tests
    }
    lines = [f"| nDCG@10 | {' | '.join([*facts, 'mean'])} |", f"| --- |{' ---: |' * (len(facts) + 1)}"]
    written = {}
    for name, means in scored.items():
        values = [float(means[test][NDCG]) for test in facts]
        mean = sum(values) / len(values)
        cells = [f"{100 * value:.2f}" for value in (*values, mean)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        tables = {test: dict(zip(MEASURES, row.tolist(), strict=True)) for test, row in means.items()}
        written[name] = {"mean_ndcg@10": mean, "tests": tables}
    write_json(folder / "nanobeir.json", {"tests": facts, "encoders": written})
    write_text(folder / "nanobeir.md", "\n".join(lines) + "\n")
    return "\n".join(lines)
