"""Scores of whole tasks: what the plain writing of the procedure gives on the same embeddings."""

import numpy as np
import pytest
from messages import says
from released import Plain
from sentevaldata import write_retrieval
from sentevalsets import write_sets

from declutr.common.errors import UsageError
from declutr.encoders.words import HashedWords
from declutr.evaluation.senteval.classifier.config import ClassifierConfig
from declutr.evaluation.senteval.data.loading import load
from declutr.evaluation.senteval.data.taskdata import sentence_rows, sentences
from declutr.evaluation.senteval.data.tasks import PROBING, STS, TASKS, TRANSFER, find
from declutr.evaluation.senteval.runner.plan import ScoringChoice, choose_tasks, methods
from declutr.evaluation.senteval.scores.scoring import cost, method_for, needs_fits, score

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
    "name", ["MR", "SST2", "TREC", "MRPC", "SICKEntailment", "SICKRelatedness", "STSBenchmark", "STS12", "Tense"]
)
def test_a_task_scores_as_by_one_fit_after_the_other(folder, name):
    data = load(find(name), folder)
    vectors = embedded(data)
    expected, elapsed = Plain().score(data, sentence_rows([data]), vectors, CONFIG)
    found = score(data, "procedure", vectors, CONFIG).scores
    assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    assert elapsed[0] > 0


def test_classifier_learns_what_words_tell(folder):
    data = load(find("SST2"), folder)
    longer = CONFIG.model_copy(update={"max_epoch": 40, "tenacity": 5})
    assert score(data, "procedure", embedded(data), longer).scores["acc"] > 65


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


def test_equal_embeddings_are_warned_of(folder):
    data = load(find("STS12"), folder)
    found = score(data, "procedure", np.ones((len(sentences(data)), 4), np.float32), CONFIG)
    assert found.scores["spearman.mean"] == 0
    says(found.warnings[0], "cosines are equal")


def test_protocol_chooses_the_method():
    both, cosine = ScoringChoice(protocols=("senteval", "simcse")), ScoringChoice(protocols=("simcse",))
    assert methods("MR", both) == ("procedure",)
    assert methods("SICKRelatedness", both) == ("procedure", "cosine")
    assert methods("STSBenchmark", cosine) == ("cosine", "geometry")
    assert methods("Tense", cosine) == ()
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
    official = ClassifierConfig.official()
    costs = {name: cost(load(find(name), folder), "procedure", official) for name in ("MR", "TREC", "SST2", "STS12")}
    assert costs["MR"] > costs["TREC"] > costs["SST2"] > costs["STS12"] > 0
