"""Scores of whole tasks as their protocols give them, on cases that can be worked out; averages of complete sets."""

import json
import math

import numpy as np
import pytest
from messages import all_of, says
from sentevaldata import write_rest, write_retrieval, write_sets, write_sts

from declutr.common.errors import DataError, UsageError
from declutr.encoders.words import HashedWords
from declutr.evaluation.senteval import protocols, scores, similarity, tasks
from declutr.evaluation.senteval.classifier import examples
from declutr.evaluation.senteval.data import inspect, load
from declutr.evaluation.senteval.features import table
from declutr.evaluation.senteval.harness import ScoringChoice
from declutr.evaluation.senteval.network import ClassifierConfig
from declutr.evaluation.senteval.scores import Report, TaskResult, averages, dev_headline, headline, score
from declutr.evaluation.senteval.similarity import aggregate, collapse_warnings, correlate, cosines
from declutr.evaluation.senteval.tasks import DOWNSTREAM, PROBING, STS, TRANSFER, find, sentence_rows, sentences

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


def test_cosine_takes_the_dev_and_the_test_pairs_and_retrieval_has_six_recalls(folder):
    data = load(find("STSBenchmark"), folder)
    found = score(data, "cosine", embedded(data), CONFIG).scores
    assert found.keys() == {"spearman", "pearson", "devspearman", "devpearson"}
    assert found["spearman"] != found["devspearman"]
    assert 0.4 < found["spearman"] < 1
    geometry = score(data, "geometry", embedded(data), CONFIG).scores
    assert geometry["num_pairs"] == sum(int((split.labels > 4).sum()) for split in data.splits.values())
    assert geometry["alignment"] == 0 > geometry["uniformity"]  # a score of 5 is the same sentence twice
    data = load(find("ImageCaptionRetrieval"), folder)
    recalls = score(data, "procedure", embedded(data), CONFIG).scores
    assert len(recalls) == 7
    assert 0 <= recalls["i2t_r1"] <= recalls["i2t_r5"] <= recalls["i2t_r10"] <= 100


def test_protocol_chooses_the_method_and_words_choose_the_tasks(folder):
    both, cosine = ScoringChoice(protocols=("senteval", "simcse")), ScoringChoice(protocols=("simcse",))
    assert both.methods("MR") == ("procedure",)
    assert both.methods("SICKRelatedness") == ("procedure", "cosine")
    assert cosine.methods("STSBenchmark") == ("cosine", "geometry")
    assert cosine.methods("Tense") == ()
    chosen = [task.name for task in tasks.TASKS if scores.method_for(task, "simcse")]
    assert chosen == list(tasks.choose_tasks(["sts", "transfer"]))
    assert not scores.needs_fits(find("STSBenchmark"), "cosine")
    assert scores.needs_fits(find("STSBenchmark"), "procedure")
    names = ("MR", "TREC", "SST2", "STS12")  # nested folds are the longest
    costs = [scores.cost(load(find(name), folder), "procedure", ClassifierConfig()) for name in names]
    assert costs[0] > costs[1] > costs[2] > costs[3] > 0
    assert tasks.choose_tasks(["sts-b", "TREC", "Tense"]) == ("TREC", "STSBenchmark", "Tense")
    assert set(tasks.choose_tasks(["probing", "sts"])) == {*PROBING, *STS}
    assert set(tasks.choose_tasks(["transfer"])) == set(TRANSFER)
    with pytest.raises(UsageError, match="no task 'STS11'"):
        tasks.choose_tasks(["STS11"])


def test_cosines_survive_what_encoders_produce_and_a_collapsed_one_gets_zero_and_a_warning_not_nan():
    first = np.array([[1.0, 0], [0, 0], [np.nan, 2], [np.inf, 0]], dtype=np.float32)
    second = np.array([[1.0, 1], [1, 1], [5, 1], [1, 0]], dtype=np.float32)
    assert cosines(first, second) == pytest.approx([2**-0.5, 0, 26**-0.5, 0])
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


def test_an_encoder_is_collapsed_by_its_mean_cosine_its_directions_or_its_zeros():
    """Eight vectors, every two with one cosine, in seven directions around their mean; vectors in two directions."""
    near, far = (np.hstack([np.full((8, 1), cosine**0.5), (1 - cosine) ** 0.5 * np.eye(8)]) for cosine in (0.995, 0.98))
    [mean] = collapse_warnings(near)
    says(mean, "0.9950")
    assert collapse_warnings(far) == ()
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
    for data, names, checked in (
        (load(find("STS16"), tmp_path), {*find("STS16").files}, ["headlines"]),
        (tasks.without_train(load(find("SICK-R"), tmp_path)), {"dev", "test"}, ["dev", "test"]),
    ):
        rows = {text: row for row, text in enumerate(sentences(data))}
        vectors = np.random.default_rng(0).normal(size=(len(rows), 8))
        scored = similarity.score_sts(data, rows, vectors)
        assert {name.partition(".")[2] for name in scored.scores} == names | {"mean", "wmean", "all"}
        if "headlines" in names:
            assert len(scored.items["spearman.all"]) == 10  # two of four rows have a score, in five subsets
        for name in checked:
            split = data.splits[name]
            sides = (vectors[[rows[text] for text in side]] for side in (split.first, split.second))
            found = scored.scores[f"pearson.{name}"], scored.scores[f"spearman.{name}"]
            assert found == correlate(cosines(*sides), split.labels)


def test_alignment_is_over_pairs_above_four_of_all_splits(tmp_path):
    write_rest(tmp_path)
    data = load(find("STS-B"), tmp_path)
    rows = {text: row for row, text in enumerate(sentences(data))}
    vectors = np.array([[2.0, 0], [0, 3]])
    found = similarity.score_geometry(data, rows, vectors)
    assert (found["num_pairs"], found["num_sentences"]) == (3, 12)
    assert found["alignment"] == pytest.approx(2)  # every pair is at a right angle
    pairs = 2 * (6 * 5 / 2)  # equal ones, of 66
    assert found["uniformity"] == pytest.approx(math.log((pairs + 36 * math.exp(-4)) / 66))
    for path in (tmp_path / "downstream/STS/STSBenchmark").glob("*.csv"):
        path.write_text(path.read_text(encoding="utf-8").replace("5.000", "4.000"), encoding="utf-8")
    with pytest.raises(ValueError, match="above 4"):
        similarity.score_geometry(load(find("STS-B"), tmp_path), rows, vectors)


def scores_of(name, value):
    procedure = find(name).procedure
    if procedure == "similarity":
        return {"spearman.mean": value / 100, "spearman.wmean": 0, "spearman.all": (value + 1) / 100}
    if procedure == "relatedness":
        return {"spearman": value / 100, "pearson": 0, "devpearson": (value + 2) / 100}
    if procedure == "retrieval":
        return {f"{way}_r{k}": value + k for way in ("i2t", "t2i") for k in (1, 5, 10)} | {"devacc": 6 * value}
    return {"acc": value, "devacc": value + 4} | ({"f1": value + 8} if name == "MRPC" else {})


def test_result_gives_the_number_of_its_table():
    for name, protocol, value in (
        ("STS12", "senteval", 50), ("STS12", "simcse", 51), ("SICKRelatedness", "senteval", 50),
        ("MRPC", "senteval", 54), ("MRPC", "simcse", 50), ("ImageCaptionRetrieval", "senteval", 50 + 16 / 3),
    ):  # fmt: skip
        assert headline(name, scores_of(name, 50), protocol) == pytest.approx(value), name
    for name, value in (("ImageCaptionRetrieval", 50), ("STSBenchmark", 52)):
        assert dev_headline(name, scores_of(name, 50)) == pytest.approx(value)
    assert dev_headline("STSBenchmark", {"spearman": 0.5, "devspearman": 0.6}) == pytest.approx(60)
    with pytest.raises(DataError, match=all_of("STS12", "dev score")):
        dev_headline("STS12", scores_of("STS12", 50))


def test_a_complete_set_has_averages_and_an_incomplete_one_says_what_it_lacks():
    """Those of test scores are the recorded ones of tests/golden/test_senteval.py."""
    results = {name: scores_of(name, 50.0) for name in DOWNSTREAM + PROBING}
    averages_of_dev = {average.name: average.dev for average in averages(results)}
    assert averages_of_dev["probing"] == pytest.approx(54)
    assert averages_of_dev["downstream"] == pytest.approx(50 + (10 * 4 + 2 * 2) / 18)
    assert averages(results)[-1].value == pytest.approx(50)  # transfer, by accuracy
    del results["SNLI"], results["Tense"]
    found = {average.name: average for average in averages(results)}
    assert found["downstream"].value is None
    assert found["downstream"].missing == ("SNLI",)
    assert found["downstream without SNLI"].value is not None
    assert found["probing"].missing == ("Tense",)
    assert found["mean of downstream and probing"].missing == ("SNLI", "Tense")
    assert found["all 28 tasks"].value is None
    assert averages({})[0].missing == DOWNSTREAM
    results = {name: scores_of(name, 70.064) for name in STS + TRANSFER}
    found = {average.name: average for average in averages(results, "simcse")}
    assert set(found) == {"STS", "transfer"}
    assert found["STS"].value == pytest.approx((5 * 71.06 + 2 * 70.06) / 7, abs=1e-12)  # of values rounded first


def test_a_report_marks_other_data_and_goes_into_json(tmp_path):
    write_rest(tmp_path)
    unpublished = inspect(find("Tense"), tmp_path, allow_unchecked=True)
    accuracy = {"acc": 50.0, "devacc": 50.0}
    result = TaskResult("Tense", "senteval", accuracy, 2, unpublished.standing, unpublished.findings)
    assert not result.comparable
    assert any("published about 100,000" in warning for warning in result.warnings)
    others = {name: TaskResult(name, "senteval", scores_of(name, 50), 9, "identical") for name in PROBING}
    report = Report("an encoder", "senteval", {**others, "Tense": result}, {"SNLI": "not asked for"})
    probing = next(average for average in report.averages() if average.name == "probing")
    assert (probing.value, probing.marked) == (pytest.approx(50), ("Tense",))
    told = json.loads(json.dumps(report.to_json()))
    assert told["results"]["Tense"]["standing"] == "unpublished"
    assert told["missing"] == {"SNLI": "not asked for"}
    assert told["averages"][2]["marked"] == ["Tense"]
