"""A test of NanoBEIR in the layout of its data sets, of random words."""

import random

import pyarrow as pa
import pyarrow.parquet as pq


def rows_of(seed):
    """Documents, queries and judgements; one document is empty, one query has no judgement, one judges nothing."""
    rng, words = random.Random(seed), [f"word{number}" for number in range(60)]
    documents = {f"d{number}": " ".join(rng.choices(words, k=rng.randint(2, 30))) for number in range(40)} | {"e": ""}
    queries = {f"q{number}": " ".join(rng.choices(words, k=3)) for number in range(12)}
    judged = [(query, document) for query in list(queries)[:-1] for document in rng.sample(list(documents)[:-1], 3)]
    return documents, queries, judged


def write_test(root, documents, queries, judged, single=False, name="NanoNQ"):
    tables = {
        "corpus": {"_id": list(documents), "text": list(documents.values())},
        "queries": {"_id": list(queries), "text": list(queries.values())},
        "qrels": {"query-id": [query for query, _ in judged], "corpus-id": [document for _, document in judged]},
    }
    for part, columns in tables.items():
        file = f"{name if single else 'train'}-00000-of-00001.parquet"
        path = root / part / file if single else root / name / part / file
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)
    return root
