"""A whole evaluation: embedded once, going on after a kill, the same wherever it runs."""

import json

import numpy as np
import pytest
import torch
from messages import all_of, says
from sentevaldata import write_sets

from declutr.common.cluster import SessionConfig
from declutr.common.errors import EncoderError
from declutr.encoders.words import HashedWords
from declutr.evaluation.senteval import harness
from declutr.evaluation.senteval.data import inspect
from declutr.evaluation.senteval.harness import ScoringChoice, embed_all, evaluate
from declutr.evaluation.senteval.network import ClassifierConfig
from declutr.evaluation.senteval.similarity import sample_rows
from declutr.evaluation.senteval.tasks import choose_tasks, find, sentence_rows

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = ClassifierConfig(num_folds=2, max_epoch=1, epoch_size=1, tenacity=0, decays=(1e-5, 1e-2))
HERE = SessionConfig(num_cpus=1)


class Counting(HashedWords):
    """Counts what it embeds; after `allowed` calls it is interrupted."""

    def __init__(self, size=16, allowed=100):
        super().__init__(size)
        self.texts, self.allowed = [], allowed

    def encode(self, texts):
        if not self.allowed:
            raise KeyboardInterrupt
        self.allowed -= 1
        self.texts += texts
        return super().encode(texts)


class Constant(HashedWords):
    value = 1.0

    def encode(self, texts):
        return np.full((len(texts), self.size), self.value, np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("sets"), rows=16)


def inspected(folder, *names):
    return [inspect(find(name), folder, allow_unchecked=True) for name in choose_tasks(names)]


def scored(encoder, folder, output, *names, said=None, session=HERE, protocols=("senteval",), geometry=True, **changes):
    choice = ScoringChoice(protocols=protocols, classifier=CONFIG.model_copy(update=changes), geometry=geometry)
    say = said.append if said is not None else len
    return evaluate(encoder, inspected(folder, *names), choice, output, session, say)


def test_each_sentence_is_embedded_once_and_results_are_read_the_second_time(folder, tmp_path):
    encoder, said = Counting(), []
    first = scored(encoder, folder, tmp_path, "SICK-E", "SICK-R", "STS12", said=said)
    assert len(encoder.texts) == len(set(encoder.texts)) > 60
    assert any("SICK-R" in line for line in said)
    report = first.reports["senteval"]
    assert set(report.results) == {"SICKEntailment", "SICKRelatedness", "STS12"}
    assert not report.results["STS12"].comparable
    assert report.missing["MR"] == "not asked for"
    (entailment,) = inspected(folder, "SICK-E")
    assert report.results["SICKEntailment"].num_rows == len(entailment.data.splits["test"])
    assert scored(Counting(allowed=0), folder, tmp_path, "SICK-E", "SICK-R", "STS12") == first
    assert not list((tmp_path / "embeddings").rglob("*.npy"))  # of no use once all is scored


def test_a_task_more_embeds_its_sentences_alone_and_other_settings_or_data_are_scored_anew(folder, tmp_path):
    scored(Counting(), folder, tmp_path, "STS12")
    encoder = Counting()
    found = scored(encoder, folder, tmp_path, "STS12", "SST2")
    assert set(encoder.texts) == set(sentence_rows([row.data for row in inspected(folder, "SST2")]))
    assert found.reports["senteval"].results.keys() == {"STS12", "SST2"}
    for data in (folder, write_sets(tmp_path / "changed", rows=16, seed=1)):
        other = Counting()
        scored(other, data, tmp_path, "SST2", seed=2)
        assert other.texts


def test_scores_by_cosine_embed_no_training_sentence(folder, tmp_path):
    encoder = Counting()
    found = scored(encoder, folder, tmp_path, "STS-B", "SICK-R", protocols=("simcse",), geometry=False)
    splits = [row.data.splits[split] for row in inspected(folder, "STS-B", "SICK-R") for split in ("dev", "test")]
    assert set(encoder.texts) == {text for pairs in splits for text in (*pairs.first, *pairs.second)}
    assert not found.geometry
    with_all = scored(Counting(), folder, tmp_path / "all", "STS-B", "SICK-R", protocols=("senteval", "simcse"))
    assert with_all.geometry
    assert found.reports["simcse"].results == with_all.reports["simcse"].results


def test_a_damaged_result_is_scored_again_and_refused_data_give_none(folder, tmp_path):
    first = scored(Counting(), folder, tmp_path, "STS12")
    (path,) = tmp_path.glob("*/STS12.json")
    whole = json.loads(path.read_text())
    path.write_text(path.read_text()[:-40])
    assert scored(Counting(), folder, tmp_path, "STS12").reports == first.reports
    assert json.loads(path.read_text()) | {"seconds": 0} == whole | {"seconds": 0}
    inspections = [*inspected(folder, "STS12"), inspect(find("Tense"), folder)]
    found = evaluate(Counting(), inspections, ScoringChoice(), tmp_path, HERE, len)
    assert set(found.reports["senteval"].results) == {"STS12"}
    says(found.reports["senteval"].missing["Tense"], "Tense train", "16 rows", "published about 100,000")
    found = scored(Counting(), folder, tmp_path, "MR", "STS12", num_folds=20)  # of which a class has too few rows
    assert set(found.reports["senteval"].results) == {"STS12"}
    assert "20" in found.reports["senteval"].missing["MR"]


def test_a_killed_embedding_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "PART_ROWS", 8)
    texts = [f"text {number}" for number in range(50)]
    killed = Counting(allowed=3)
    with pytest.raises(KeyboardInterrupt):
        embed_all(killed, texts, tmp_path, len)
    torn = next(tmp_path.rglob("part-00001.npy"))
    torn.write_bytes(torn.read_bytes()[:-7])
    other = Counting()
    vectors = embed_all(other, texts, tmp_path, len)
    assert other.texts == texts[8:16] + texts[24:]
    rows = np.array([49, 0, 13, 13, 24])
    assert np.array_equal(vectors.take(rows), HashedWords(16).encode([texts[row] for row in rows]))
    for encoder, own in ((Counting(), texts[:9]), (Counting(8), texts)):  # each has a folder of its own
        embed_all(encoder, own, tmp_path, len)
        assert encoder.texts == own
    for array in (np.zeros((8, 5), np.float32), np.zeros((8, 16)), np.zeros((7, 16), np.float32)):
        np.save(torn, array)
        other = Counting()
        embed_all(other, texts, tmp_path, len)
        assert other.texts == texts[8:16], "a part of another shape or type is not read"


def test_a_killed_scoring_goes_on(folder, tmp_path):
    whole = scored(Counting(), folder, tmp_path / "whole", "SICK-E", "SST2", "STS12")

    class Killing(list):
        """Progress lines, of which the one after the second unit interrupts the scoring."""

        def append(self, line):
            if ": 2/3 " in line:
                raise KeyboardInterrupt
            super().append(line)

    with pytest.raises(KeyboardInterrupt):
        scored(Counting(), folder, tmp_path / "killed", "SICK-E", "SST2", "STS12", said=Killing())
    assert len(list((tmp_path / "killed").glob("*/*.json"))) == 2
    encoder, said = Counting(), []
    again = scored(encoder, folder, tmp_path / "killed", "SICK-E", "SST2", "STS12", said=said)
    assert again.reports == whole.reports
    says(said[0], "2 of 3")
    assert encoder.texts == []  # the embeddings were there too
    assert any(": 1/1 " in line for line in said)


def test_both_protocols_share_what_they_have_in_common(folder, tmp_path):
    found = scored(Counting(), folder, tmp_path, "MRPC", "STS12", "STS-B", protocols=("senteval", "simcse"))
    names = {path.name for path in tmp_path.glob("*/*.json")}
    assert names == {
        "encoder.json", "MRPC.json", "STS12.json", "STSBenchmark.json",
        "STSBenchmark.cosine.json", "STSBenchmark.geometry.json",
    }  # fmt: skip
    senteval, simcse = found.reports["senteval"].results, found.reports["simcse"].results
    assert senteval["STS12"].scores == simcse["STS12"].scores
    assert senteval["STS12"].headline == pytest.approx(100 * senteval["STS12"].scores["spearman.mean"])
    assert simcse["STS12"].headline == pytest.approx(100 * simcse["STS12"].scores["spearman.all"])
    assert senteval["STSBenchmark"].scores.keys() - simcse["STSBenchmark"].scores.keys() == {"mse"}
    assert found.geometry["num_sentences"] == 96


def test_a_collapsed_encoder_is_warned_of_and_one_without_numbers_refused(folder, tmp_path):
    said = []
    found = scored(Constant(8), folder, tmp_path, "STS12", said=said)
    says(found.warnings[0], "collapsed", "mean cosine", "1.0000")
    assert any("WARNING" in line for line in said)
    sts12 = found.reports["senteval"].results["STS12"]
    says(sts12.warnings[0], "cosines are equal")
    assert sts12.scores["spearman.mean"] == 0
    assert scored(Constant(8), folder, tmp_path, "STS12").warnings == found.warnings  # also when read
    broken = Constant(9)
    broken.value = np.nan
    with pytest.raises(EncoderError, match=all_of("finite", "no score")):
        scored(broken, folder, tmp_path, "STS12")
    assert len(sample_rows(5000)) == len(set(sample_rows(5000).tolist())) == 2000  # in which collapse is looked for
    assert sample_rows(7).tolist() == list(range(7))


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.usefixtures("session")
def test_harness_on_ray_gives_the_results_of_this_process(folder, tmp_path, monkeypatch):
    names = ("SST2", "SICK-R", "STS12", "Tense")
    here = scored(Counting(), folder, tmp_path / "here", *names)
    monkeypatch.setattr(harness, "_WORTH_IT", 0)
    with monkeypatch.context() as this_process:
        this_process.delattr(torch, "set_num_threads")  # a unit that is scored here would fail
        there = scored(Counting(), folder, tmp_path / "ray", *names, session=SessionConfig(num_cpus=2))
    assert there.reports == here.reports
