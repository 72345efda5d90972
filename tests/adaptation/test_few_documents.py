"""`declutr adapt` of few documents, in five folds, and of passages of one's own."""

import shutil

import numpy as np
import pytest
from adapting import WORDS, corpus
from folders import jsonl
from messages import all_of, says
from volumes import small_volume

from declutr.adaptation import scores as adaptation_scores
from declutr.adaptation.candidates import CLOSED, FOLDS, TRAINED, CandidateBuilder, load_transformer
from declutr.adaptation.config import AdaptConfig
from declutr.adaptation.job import adapt
from declutr.adaptation.paragraphs import paragraph_pairs
from declutr.adaptation.passages import all_documents, make_passages
from declutr.common.errors import DataError, UsageError
from declutr.evaluation.retrieval.pairs import read_passages
from declutr.pipeline.filters.document_filter import normalise
from declutr.pipeline.readers.corpus import document_id
from declutr.pipeline.shards.shards import ShardSet


def judged_by_folds(encoder, output, result, name):
    """The scores are those of fits on all documents but those of the fold."""
    config = AdaptConfig(encoder=str(encoder), corpus=[str(output.parent / "documents.jsonl")])
    texts, start = all_documents(config.prepare_config(output / "data").corpus, output / "data"), []
    tokenizer, values = load_transformer(str(encoder)).tokenizer, []
    for fold in range(FOLDS):
        own, folder = texts[fold::FOLDS], output / "folds" / str(fold)
        shards = ShardSet(folder / "data", "train")
        ids = {*shards.take(np.arange(shards.num_documents))["id"].to_pylist()}
        assert ids == {document_id(normalise(text).encode()) for text in texts if text not in own}
        fitted = load_transformer(str(CandidateBuilder(config, folder, folder / "candidates").place(name)))
        test = adaptation_scores.TestSet(make_passages(own, tokenizer))
        values.append(test.encoder(fitted))
        start.append(test.encoder(load_transformer(str(encoder))))
    baselines, hybrid = ["start", "BM25", "IDF cosine", "start + IDF cosine"], f"{name} + IDF cosine"
    assert [row.name for row in result.rows] == [*baselines, name, hybrid]
    scores = {row.name: row.scores["distant"] for row in result.rows}
    for row, parts in (("start", start), (name, values)):
        assert scores[row] == pytest.approx(np.nanmean(adaptation_scores.merged(parts)["distant"]), abs=1e-6)
    assert result.verdict.comparison.rows == len(texts)
    assert result.chosen == name
    says(result.sentence, name, "five fits")
    better = result.verdict.outcome == "better"
    assert ("one fit on all" in result.sentence) == (output / "encoder").exists() == better
    number = result.facts["training_documents"] * (1 if better else FOLDS / (FOLDS - 1))
    assert len(texts) - FOLDS <= number <= len(texts) + 1


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.usefixtures("session")
def test_training_on_few_documents_is_judged_by_fits_that_never_saw_the_documents(encoder, tmp_path):
    documents, output = corpus(tmp_path / "documents.jsonl", 82), tmp_path / "adapted"
    result = adapt(encoder, documents, output, steps=20)
    judged_by_folds(encoder, output, result, TRAINED)
    assert (again := adapt(encoder, documents, output, steps=20)).sentence == result.sentence
    assert again.looks == 1


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("session")
def test_a_full_disk_is_told_and_the_same_command_continues(encoder, tmp_path):
    documents = corpus(tmp_path / "documents.jsonl", 120)
    with small_volume(tmp_path / "disk", 16) as volume:
        documents, output = shutil.copy(documents, volume.path), volume.path / "adapted"
        result = adapt(encoder, documents, output, steps=0)
        judged_by_folds(encoder, output, result, CLOSED)
        shutil.rmtree(output / "folds")
        volume.fill(leave_bytes=0)
        with pytest.raises(UsageError, match=all_of("--output", "No space left", "same command")):
            adapt(encoder, documents, output, steps=0)
        volume.drain()
        assert adapt(encoder, documents, output, steps=0).sentence == result.sentence


def sentence(rng, words):
    return " ".join(rng.choice(WORDS, words)).capitalize() + "."


def write_passages(path, documents, each=6):
    """Passages of a first sentence and others, of which documents that have numbers for names take turns."""
    rng, names = np.random.default_rng(3), [*range(documents)] * each
    rows = [{"document": number, "text": f"{sentence(rng, 6)} {sentence(rng, 24)}"} for number in names]
    jsonl(path, rows)
    return rows


def test_passages_are_joined_by_document_in_the_order_of_the_file(tmp_path):
    path = tmp_path / "passages.jsonl"
    rows = write_passages(path, 3, each=2)
    texts = [[row["text"] for row in rows if row["document"] == number] for number in range(3)]
    assert read_passages(path) == {"\n\n".join(part): part for part in texts}
    table = tmp_path / "passages.csv"
    table.write_text("document,text\nb,one\na,two\nb,three\n")
    assert read_passages(table) == {"one\n\nthree": ["one", "three"], "two": ["two"]}
    number = f'{{"document": {"1" * 5000}, "text": "one"}}\n'
    cases = {"": "holds no passages", '{"document": 1, "text": 2}\n': "text", number: "is not JSON Lines"}
    for content, word in cases.items():
        path.write_text(content)
        with pytest.raises(DataError, match=all_of("passages.jsonl", word)):
            read_passages(path)


def test_first_sentences_of_own_passages_search_the_rest_and_not_the_next_passage(encoder):
    rng = np.random.default_rng(0)
    own = [f"{sentence(rng, 6)} {sentence(rng, 24)}\n\n{sentence(rng, 30)}" for _ in range(3)]
    body = "\n\n".join(own)
    pairs = paragraph_pairs({"test": [body]}, load_transformer(str(encoder)).tokenizer, 10_000, {body: own})["test"]
    assert pairs.queries == [text.split(". ")[0] + "." for text in own]
    assert pairs.answers == [" ".join(text.split(". ", 1)[1].split()) for text in own]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("session")
def test_own_passages_judge_as_they_are_and_stay_what_they_were(encoder, tmp_path):
    file, output = tmp_path / "passages.jsonl", tmp_path / "adapted"
    rows = write_passages(file, 70)
    result = adapt(encoder, [], output, passages=file, steps=0)
    assert (result.primary, result.chosen, result.verdict.comparison.rows) == ("sentences", CLOSED, 70)
    assert (result.facts["documents"], result.facts["steps"]) == (70, 0)
    candidates = [*output.glob("folds/*/candidates/*")]
    assert {path.name for path in candidates} == {"closed-form"}, "nothing was trained"
    files = [path for folder in candidates for path in folder.rglob("*") if path.suffix in (".json", ".md")]
    assert len(files) > 5 * FOLDS
    places = [str(tmp_path), str(encoder)]
    assert not any(place in path.read_text() for path in files for place in places), "others may get it"
    assert adapt(encoder, [], output, passages=file, steps=0).sentence == result.sentence
    output = output.rename(tmp_path / "moved")
    assert adapt(encoder, [], output, passages=file, steps=0).sentence == result.sentence
    write_passages(file, 71)
    with pytest.raises(UsageError, match=all_of("--passages", "has changed", "restore it")):
        adapt(encoder, [], output, passages=file, steps=0)
    with pytest.raises(UsageError, match=all_of("another seed", "another folder")):
        adapt(encoder, [], output, passages=file, steps=0, seed=1)
    jsonl(file, rows)
    assert adapt(encoder, [], output, passages=file, steps=0).looks == 1
