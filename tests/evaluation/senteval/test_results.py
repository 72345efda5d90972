"""Averages over complete sets alone; what is missing or on other data is named."""

import json

import pytest
from messages import all_of
from sentevaldata import write_rest

from declutr.common.errors import DataError
from declutr.evaluation.senteval.data import inspect
from declutr.evaluation.senteval.scores import Report, TaskResult, averages, dev_headline, headline
from declutr.evaluation.senteval.tasks import DOWNSTREAM, PROBING, STS, TRANSFER, find


def scores_of(name, value):
    procedure = find(name).procedure
    if procedure == "similarity":
        return {"spearman.mean": value / 100, "spearman.wmean": 0, "spearman.all": (value + 1) / 100}
    if procedure == "relatedness":
        return {"spearman": value / 100, "pearson": 0, "devpearson": (value + 2) / 100}
    if procedure == "retrieval":
        return {f"{way}_r{k}": value + k for way in ("i2t", "t2i") for k in (1, 5, 10)} | {"devacc": 6 * value}
    return {"acc": value, "devacc": value + 4} | ({"f1": value + 8} if name == "MRPC" else {})


def complete(value=50.0):
    return {name: scores_of(name, value) for name in DOWNSTREAM + PROBING}


def test_result_gives_the_number_of_its_table():
    assert headline("STS12", scores_of("STS12", 50)) == pytest.approx(50)
    assert headline("STS12", scores_of("STS12", 50), "simcse") == pytest.approx(51)
    assert headline("SICKRelatedness", scores_of("SICKRelatedness", 50)) == pytest.approx(50)
    assert headline("MRPC", scores_of("MRPC", 50)) == pytest.approx(54)
    assert headline("MRPC", scores_of("MRPC", 50), "simcse") == pytest.approx(50)
    assert headline("ImageCaptionRetrieval", scores_of("ImageCaptionRetrieval", 50)) == pytest.approx(50 + 16 / 3)
    assert dev_headline("ImageCaptionRetrieval", scores_of("ImageCaptionRetrieval", 50)) == pytest.approx(50)
    assert dev_headline("STSBenchmark", scores_of("STSBenchmark", 50)) == pytest.approx(52)
    assert dev_headline("STSBenchmark", {"spearman": 0.5, "devspearman": 0.6}) == pytest.approx(60)
    with pytest.raises(DataError, match=all_of("STS12", "dev score")):
        dev_headline("STS12", scores_of("STS12", 50))


def test_complete_set_has_averages_of_dev_scores_too():
    """Those of test scores are the recorded ones of tests/golden/test_senteval.py."""
    averages_of_dev = {average.name: average.dev for average in averages(complete())}
    assert averages_of_dev["probing"] == pytest.approx(54)
    assert averages_of_dev["downstream"] == pytest.approx(50 + (10 * 4 + 2 * 2) / 18)
    assert averages(complete())[-1].value == pytest.approx(50)  # transfer, by accuracy


def test_an_incomplete_set_has_no_average_and_says_what_it_lacks():
    results = complete()
    del results["SNLI"], results["Tense"]
    found = {average.name: average for average in averages(results)}
    assert found["downstream"].value is None
    assert found["downstream"].missing == ("SNLI",)
    assert found["downstream without SNLI"].value is not None
    assert found["probing"].missing == ("Tense",)
    assert found["mean of downstream and probing"].missing == ("SNLI", "Tense")
    assert found["all 28 tasks"].value is None
    assert averages({})[0].missing == DOWNSTREAM


def test_simcse_averages_what_its_table_prints():
    results = {name: scores_of(name, 70.064) for name in STS + TRANSFER}
    found = {average.name: average for average in averages(results, "simcse")}
    assert set(found) == {"STS", "transfer"}
    assert found["STS"].value == pytest.approx((5 * 71.06 + 2 * 70.06) / 7, abs=1e-12)  # of values rounded first


def test_a_report_marks_other_data_and_goes_into_json(tmp_path):
    write_rest(tmp_path)
    unpublished = inspect(find("Tense"), tmp_path, allow_unchecked=True)
    scores = {"acc": 50.0, "devacc": 50.0}
    result = TaskResult("Tense", "senteval", scores, 2, unpublished.standing, unpublished.findings)
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
