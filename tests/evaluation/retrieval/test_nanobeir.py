"""NanoBEIR in the layout of its data sets: the scores of sentence-transformers, names, poor files, following a run."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from messages import all_of, says
from nanofiles import rows_of, write_test
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from declutr.cli.main import main
from declutr.common.errors import DataError
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import CutEncoder
from declutr.evaluation.retrieval.nanobeir import NAMES, read_nanobeir, score_nanobeir, split_names


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data of two tests, the second in the layout of one data set for all tests."""
    root = tmp_path_factory.mktemp("data")
    write_test(root / "nanobeir", *rows_of(0))
    write_test(root / "nanobeir", *rows_of(1), single=True, name="NanoSciFact")
    return root


@pytest.mark.parametrize("size", [None, 5])
def test_nanobeir_scores_are_those_of_sentence_transformers(folder, model, size):
    encoder = load_encoder(str(model), device="cpu")
    sizes = () if size is None else (size,)
    found = score_nanobeir(encoder, read_nanobeir(folder, ("NanoNQ", "NanoSciFact")), sizes, lambda _: None)
    for seed, name in enumerate(("NanoNQ", "NanoSciFact")):
        documents, queries, judged = rows_of(seed)
        relevant = {query: {d for q, d in judged if q == query} for query in {query for query, _ in judged}}
        corpus = {key: text for key, text in documents.items() if text}
        theirs = InformationRetrievalEvaluator(queries, corpus, relevant, truncate_dim=size, write_csv=False)(
            SentenceTransformer(str(model), device="cpu")
        )
        recall_1, recall_5, recall_10, _, ndcg = found[size or encoder.size][name]
        assert ndcg == pytest.approx(theirs["cosine_ndcg@10"], abs=1e-6)
        for ours, k in ((recall_1, 1), (recall_5, 5), (recall_10, 10)):
            assert ours == pytest.approx(theirs[f"cosine_recall@{k}"], abs=1e-6)


def test_nanobeir_by_name_writes_the_table_of_each_size(folder, model, tmp_path, capsys):
    given = ["--data", str(folder), "--tasks", "nanonq,NanoSciFact", "--sizes", "8", "--output", str(tmp_path)]
    assert main(["evaluate", str(model), *given]) == 0
    written = json.loads((tmp_path / "nanobeir.json").read_text())
    assert list(written["encoders"]) == [f"{model} [8]", str(model)]
    assert set(written["tests"]) == {"NanoNQ", "NanoSciFact"}
    scores = written["encoders"][str(model)]
    assert scores["mean_ndcg@10"] == pytest.approx(sum(one["ndcg@10"] for one in scores["tests"].values()) / 2)
    says(capsys.readouterr().out, "NanoNQ", "NanoSciFact", "mean")


def test_nanobeir_set_has_thirteen_names_and_leaves_the_other_words():
    assert split_names(["sts", "NanoBEIR", "MR"]) == (NAMES, ["sts", "MR"])
    assert len(NAMES) == 13
    assert split_names(["nanofiqa2018", "NanoFiQA2018"]) == (("NanoFiQA2018",), [])
    with pytest.raises(DataError, match=all_of("'NanoFIQA'", "`NanoFiQA2018`")):
        split_names(["NanoFIQA"])


def test_nanobeir_judgements_of_missing_documents_are_counted(tmp_path):
    documents, queries, judged = rows_of(0)
    root = write_test(tmp_path / "nanobeir", documents, queries, [*judged, ("q0", "e"), ("q1", "gone"), ("q", "d1")])
    (found,) = read_nanobeir(tmp_path, ("NanoNQ",))
    assert found.left_out == 3
    (whole,) = read_nanobeir(write_test(root / "other" / "nanobeir", *rows_of(0)).parent, ("NanoNQ",))
    assert found.test == whole.test
    assert found.digest != whole.digest


@pytest.mark.parametrize(
    ("part", "change", "facts"),
    [
        ("corpus", None, ("NanoNQ (corpus)", "hf download zeta-alpha-ai/NAME")),
        ("corpus", {"_id": ["a"], "title": ["x"]}, ("corpus", "no column text")),
        ("queries", {"_id": [1, 2], "text": ["x", "y"]}, ("queries", "int64")),
        ("queries", {"_id": ["q0", None], "text": ["x", "y"]}, ("queries", "rows without _id")),
        ("qrels", {"query-id": ["q"], "corpus-id": ["d"]}, ("none of its 1 judgements",)),
        ("qrels", b"PAR1 and no more", ("qrels", "not Parquet")),
    ],
)
def test_nanobeir_of_poor_files_names_the_file(tmp_path, part, change, facts):
    root = write_test(tmp_path / "nanobeir", *rows_of(0))
    (path,) = (root / "NanoNQ" / part).iterdir()
    path.unlink()
    if isinstance(change, bytes):
        path.write_bytes(change)
    elif change:
        pq.write_table(pa.table(change), path)
    with pytest.raises(DataError, match=all_of(facts)):
        read_nanobeir(tmp_path, ("NanoNQ",))


@pytest.mark.parametrize(
    ("sizes", "facts"),
    [
        ("32", ("--sizes 32", "32 numbers", "smaller")),
        ("0", ("'0'", "from 1")),
        ("8,2.5,x", ("'2.5', 'x'", "whole numbers")),
        ("8,8", ("twice",)),
    ],
)
def test_sizes_of_the_command_that_are_none_are_refused(folder, model, tmp_path, sizes, facts, capsys):
    given = ["--data", str(folder), "--tasks", "NanoNQ", "--output", str(tmp_path), "--sizes", sizes]
    assert main(["evaluate", str(model), *given]) == 1
    says(capsys.readouterr().err, *facts)


def test_cut_encoder_has_the_first_numbers_and_its_own_fingerprint(model):
    encoder = load_encoder(str(model), device="cpu")
    cut = CutEncoder(encoder, 7)
    assert (cut.encode(["a b"]) == encoder.encode(["a b"])[:, :7]).all()
    assert len({cut.fingerprint, CutEncoder(encoder, 8).fingerprint, encoder.fingerprint}) == 3
