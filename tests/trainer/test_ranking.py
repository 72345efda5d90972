"""Which weights are the best, and since when: laws, and real files."""

import pytest
import tinyruns as runs
from hypothesis import given
from hypothesis import strategies as st
from messages import all_of
from states import state_of

from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.ranking import BestScore, EarlyStopping, find_best, history
from declutr.trainer.metrics.metrics import MetricsWriter
from declutr.trainer.parallel.request import Request


@given(st.dictionaries(st.integers(1, 50), st.integers(0, 4).map(float), max_size=12))
def test_laws_of_a_best_score(scores):
    now = BestScore.of(scores)
    assert (now is None) == (not scores)
    if now is not None:
        assert now.score == scores[now.step] == max(scores.values())
        assert all(score < now.score for step, score in scores.items() if step < now.step)
        assert now.since == len([step for step in scores if step > now.step])


def test_held_out_scores_begin_after_the_untrained_weights(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    for step in (0, 2, 4, 6, 8):
        writer.scores(step, {"mrr": step / 10, "recall_at_1": 0.5})
    writer.close()
    assert history(tmp_path, "mrr", 6) == {2: 0.2, 4: 0.4, 6: 0.6}
    assert history(tmp_path / "nothing", "mrr", 6) == {}


def test_a_run_ends_when_as_many_scores_as_its_patience_are_no_better_than_the_best(tmp_path):
    stopping = EarlyStopping(tmp_path, "mrr", 2)
    stopping.measured(0, {"mrr": 0.9})  # the untrained weights do not count
    found = []
    for step, score in ((2, 0.3), (4, 0.5), (6, 0.5), (8, 0.4)):
        stopping.measured(step, {"mrr": score})
        found.append(stopping.request)
    assert found == [Request(0), Request(0), Request(0), Request.EARLY]


def test_lines_and_checkpoints_without_a_score_do_not_count(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    for step, scores in ((6, {"mrr": 0.9}), (8, {"mrr": 0.1, "distant_mrr": 0.2})):
        writer.scores(step, scores)
        checkpoint.save(tmp_path / "checkpoints", state_of(step, **scores), {"encoder.safetensors": {}})
    writer.close()
    assert (history(tmp_path, "distant_mrr", 8), history(tmp_path, "mrr", 8)) == ({8: 0.2}, {6: 0.9, 8: 0.1})
    assert find_best(tmp_path / "checkpoints", "distant_mrr")[1].step == 8
    assert find_best(tmp_path / "checkpoints", "mrr")[1].step == 6


def config_of(**changes):
    return runs.least_config(**{"export": "best"} | changes)


def test_patience_is_no_part_of_a_runs_identity_and_the_score_is():
    saving = {"every_steps": 100}
    plain, patient = config_of(checkpoint=saving), config_of(checkpoint=saving, validation={"patience": 3})
    assert plain.hash() == patient.hash()
    assert plain.resume_settings()["validation"]["score"] == "distant_recall_at_1"
    assert "patience" not in plain.resume_settings()["validation"]
    assert plain.hash() != config_of(validation={"score": "mrr"}).hash()


def test_the_score_of_another_process_is_refused_and_a_run_that_has_it_is_read():
    with pytest.raises(ValueError, match=all_of("score = followed", "declutr evaluate RUN", "validation.stsb")):
        config_of(validation={"score": "followed"})
    values = config_of().model_dump(mode="json")
    values["validation"]["score"] = "followed"
    assert type(config_of()).stored(values) == config_of()


def test_an_objective_without_scores_chooses_nothing_and_its_runs_of_earlier_versions_go_on(monkeypatch):
    monkeypatch.setattr(type(config_of().objective), "scores", ())
    plain = config_of(export="last")
    assert plain.validation.score == ""
    assert plain == config_of(export="last", validation={"score": "followed"}), "as earlier versions stored it"
    assert plain.resume_settings()["validation"]["score"] == "followed"
    with pytest.raises(ValueError, match=all_of("export = best", "has none", "validation.stsb")):
        config_of()
