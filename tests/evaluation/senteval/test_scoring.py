"""Scores of whole tasks as their protocols give them; cosines and geometry on cases that can be worked out."""

import math

import numpy as np
import pytest
import torch
from messages import all_of, says
from sentevaldata import write_rest, write_retrieval, write_sets, write_sts

from declutr.common.errors import UsageError
from declutr.encoders.words import HashedWords
from declutr.evaluation.senteval import protocols, similarity
from declutr.evaluation.senteval.classifier import examples
from declutr.evaluation.senteval.data import load
from declutr.evaluation.senteval.features import table
from declutr.evaluation.senteval.harness import ScoringChoice
from declutr.evaluation.senteval.network import ClassifierConfig
from declutr.evaluation.senteval.scores import cost, method_for, needs_fits, score
from declutr.evaluation.senteval.similarity import (
    aggregate,
    blockwise_uniformity,
    collapse_warnings,
    correlate,
    cosines,
    score_geometry,
    score_sts,
)
from declutr.evaluation.senteval.tasks import (
    PROBING,
    STS,
    TASKS,
    TRANSFER,
    choose_tasks,
    find,
    sentence_rows,
    sentences,
    without_train,
)
from declutr.trainer.objectives.scores import uniformity

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = ClassifierConfig(
    num_folds=2, max_epoch=4, epoch_size=1, tenacity=0, batch_size=16, decays=(1e-5, 1e-2), learning_rate=0.05
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_sets(tmp_path_factory.mktemp("sets"))
    write_retrieval(path, images=40)
    return path


def embedded(data):
    return HashedWords(24).encode(sentences(data))


@pytest.mark.parametrize(
    "name", ["MR", "SST2", "TREC", "MRPC", "SICKEntailment", "SICKRelatedness", "STSBenchmark", "Tense"]
)
def test_a_task_scores_as_its_protocol_on_features_made_by_hand(folder, name):
    data = load(find(name), folder)
    vectors, rows = embedded(data), sentence_rows([data])
    parts = []
    for split in data.splits.values():
        sides = (split.first, split.second) if split.second else (split.first,)
        first, *second = (vectors[[rows[text] for text in side]] for side in sides)
        parts.append((table(np.c_[np.abs(first - second[0]), first * second[0]] if second else first), split.labels))
    if data.task.procedure == "relatedness":
        expected = protocols.relatedness(*(protocols.Pairs(*part) for part in parts))[0]
    else:
        fit = getattr(protocols, data.task.procedure)
        expected = fit(*(examples(*part) for part in parts), len(data.classes), CONFIG)[0]
    assert score(data, "procedure", vectors, CONFIG).scores == pytest.approx(expected, abs=1e-6)


def test_cosine_takes_the_dev_and_the_test_pairs(folder):
    data = load(find("STSBenchmark"), folder)
    found = score(data, "cosine", embedded(data), CONFIG).scores
    assert found.keys() == {"spearman", "pearson", "devspearman", "devpearson"}
    assert found["spearman"] != found["devspearman"]
    assert 0.4 < found["spearman"] < 1
    geometry = score(data, "geometry", embedded(data), CONFIG).scores
    assert geometry["num_pairs"] == sum(int((split.labels > 4).sum()) for split in data.splits.values())
    assert geometry["alignment"] == 0 > geometry["uniformity"]  # a score of 5 is the same sentence twice


def test_retrieval_has_six_recalls(folder):
    data = load(find("ImageCaptionRetrieval"), folder)
    found = score(data, "procedure", embedded(data), CONFIG).scores
    assert len(found) == 7
    assert 0 <= found["i2t_r1"] <= found["i2t_r5"] <= found["i2t_r10"] <= 100


def test_protocol_chooses_the_method():
    both, cosine = ScoringChoice(protocols=("senteval", "simcse")), ScoringChoice(protocols=("simcse",))
    assert both.methods("MR") == ("procedure",)
    assert both.methods("SICKRelatedness") == ("procedure", "cosine")
    assert cosine.methods("STSBenchmark") == ("cosine", "geometry")
    assert cosine.methods("Tense") == ()
    assert [task.name for task in TASKS if method_for(task, "simcse")] == list(choose_tasks(["sts", "transfer"]))
    assert not needs_fits(find("STSBenchmark"), "cosine")
    assert needs_fits(find("STSBenchmark"), "procedure")


def test_tasks_are_chosen_by_name_label_and_set():
    assert choose_tasks(["sts-b", "TREC", "Tense"]) == ("TREC", "STSBenchmark", "Tense")
    assert set(choose_tasks(["probing", "sts"])) == {*PROBING, *STS}
    assert set(choose_tasks(["transfer"])) == set(TRANSFER)
    with pytest.raises(UsageError, match="no task 'STS11'"):
        choose_tasks(["STS11"])


def test_nested_folds_are_the_longest(folder):
    official = ClassifierConfig()
    costs = {name: cost(load(find(name), folder), "procedure", official) for name in ("MR", "TREC", "SST2", "STS12")}
    assert costs["MR"] > costs["TREC"] > costs["SST2"] > costs["STS12"] > 0


def random_rows(data, seed=0, size=8):
    texts = sentences(data)
    return {text: row for row, text in enumerate(texts)}, np.random.default_rng(seed).normal(size=(len(texts), size))


def test_cosines_survive_what_encoders_produce():
    first = np.array([[1.0, 0], [0, 0], [np.nan, 2], [np.inf, 0]], dtype=np.float32)
    second = np.array([[1.0, 1], [1, 1], [5, 1], [1, 0]], dtype=np.float32)
    assert cosines(first, second) == pytest.approx([2**-0.5, 0, 26**-0.5, 0])


def test_a_collapsed_encoder_gets_zero_and_a_warning_not_nan():
    gold = np.array([1.0, 2, 3])
    score = aggregate({"a": (np.full(3, 0.7), gold), "b": (gold, gold)})
    assert score.scores["spearman.a"] == 0
    assert score.scores["spearman.mean"] == pytest.approx(0.5)
    [warning] = score.warnings
    says(warning, "no correlation", "a", "cosines are equal", "0")
    assert aggregate({"b": (gold, gold)}).warnings == ()
    with pytest.raises(ValueError, match=all_of("1 values", "1 gold scores")):
        correlate(np.array([1.0]), np.array([1.0]))
    assert correlate(np.array([0.1, 0.2]), np.ones(2)) == (0, 0)


@pytest.mark.parametrize(("cosine", "told"), [(0.98, ()), (0.995, ("0.9950",))])
def test_an_encoder_is_collapsed_if_the_mean_cosine_of_different_sentences_is_above_099(cosine, told):
    """Eight vectors, every two with this cosine, in seven directions around their mean."""
    vectors = np.hstack([np.full((8, 1), cosine**0.5), (1 - cosine) ** 0.5 * np.eye(8)])
    found = collapse_warnings(vectors)
    assert len(found) == len(told)
    assert all(part in warning for part, warning in zip(told, found, strict=True))


def test_an_encoder_is_collapsed_in_two_directions_or_with_more_than_a_hundredth_of_zeros():
    corners = np.eye(16)[[0, 1]]
    [two] = collapse_warnings(np.vstack([corners, -corners]))
    says(two, "collapsed", "2.0 of 16 dimensions")
    vectors = np.random.default_rng(0).normal(size=(200, 16))
    vectors[:2] = 0
    assert collapse_warnings(vectors) == ()
    vectors[2] = 0
    [zeros] = collapse_warnings(vectors)
    says(zeros, "3 of 200", "zero")


def test_a_task_is_scored_on_its_subsets_and_sick_r_on_dev_and_test(tmp_path):
    write_rest(tmp_path)
    write_sts(tmp_path, {16: find("STS16").files})
    data = load(find("STS16"), tmp_path)
    rows, vectors = random_rows(data)
    score = score_sts(data, rows, vectors)
    assert {name.partition(".")[2] for name in score.scores} == {*find("STS16").files, "mean", "wmean", "all"}
    assert len(score.items["spearman.all"]) == 10  # two of four rows have a score, in five subsets
    split = data.splits["headlines"]
    pair = [cosines(vectors[[rows[a]]], vectors[[rows[b]]])[0] for a, b in zip(split.first, split.second, strict=True)]
    assert of_subset(score, "headlines") == correlate(np.array(pair), split.labels)
    benchmark = without_train(load(find("SICK-R"), tmp_path))
    score = score_sts(benchmark, *random_rows(benchmark))
    assert {name.partition(".")[2] for name in score.scores} == {"dev", "test", "mean", "wmean", "all"}
    for name in ("dev", "test"):
        assert of_subset(score, name) == score_split(benchmark, name)


def of_subset(score, name):
    return score.scores[f"pearson.{name}"], score.scores[f"spearman.{name}"]


def score_split(data, name):
    split, (rows, vectors) = data.splits[name], random_rows(data)
    first, second = (vectors[[rows[text] for text in side]] for side in (split.first, split.second))
    return correlate(cosines(first, second), split.labels)


def test_uniformity_in_blocks_is_uniformity(monkeypatch):
    vectors = torch.randn(53, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    monkeypatch.setattr(similarity, "_BLOCK", 10)
    assert blockwise_uniformity(vectors) == pytest.approx(uniformity(vectors), abs=1e-12)


def test_alignment_is_over_pairs_above_four_of_all_splits(tmp_path):
    write_rest(tmp_path)
    data = load(find("STS-B"), tmp_path)
    rows = {text: row for row, text in enumerate(sentences(data))}
    vectors = np.array([[2.0, 0], [0, 3]])
    found = score_geometry(data, rows, vectors)
    assert (found["num_pairs"], found["num_sentences"]) == (3, 12)
    assert found["alignment"] == pytest.approx(2)  # every pair is at a right angle
    pairs = 2 * (6 * 5 / 2)  # equal ones, of 66
    assert found["uniformity"] == pytest.approx(math.log((pairs + 36 * math.exp(-4)) / 66))
    with pytest.raises(ValueError, match="above 4"):
        score_geometry(load(find("STS-B"), low_scores(tmp_path)), rows, vectors)


def low_scores(folder):
    for path in (folder / "downstream/STS/STSBenchmark").glob("*.csv"):
        path.write_text(path.read_text(encoding="utf-8").replace("5.000", "4.000"), encoding="utf-8")
    return folder
