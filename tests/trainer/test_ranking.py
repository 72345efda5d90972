"""Which weights are the best, and since when: laws, and real files."""

import json

import pytest
import tinyruns as runs
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import all_of
from states import state_of

from declutr.common.scores import ScoreLine, append_score, scoring
from declutr.trainer.checkpoints import checkpoint, retention
from declutr.trainer.checkpoints.config import CheckpointConfig
from declutr.trainer.checkpoints.ranking import FOLLOWED, BestScore, EarlyStopping, find_best, history, unscored
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


def test_held_out_scores_begin_after_the_untrained_weights_and_after_a_fork(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    for step in (0, 2, 4, 6, 8):
        writer.scores(step, {"mrr": step / 10, "recall_at_1": 0.5})
    writer.close()
    assert history(tmp_path, "mrr", 6) == {2: 0.2, 4: 0.4, 6: 0.6}
    (tmp_path / "fork.json").write_text(json.dumps({"from": "elsewhere", "step": 4}))
    assert history(tmp_path, "mrr", 6) == {6: 0.6}
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
    """Those that a fork with another `validation.score` takes over."""
    writer = MetricsWriter(tmp_path, 0)
    for step, scores in ((6, {"mrr": 0.9}), (8, {"mrr": 0.1, "distant_mrr": 0.2})):
        writer.scores(step, scores)
        checkpoint.save(tmp_path / "checkpoints", state_of(step, **scores), {"encoder.safetensors": {}})
    writer.close()
    assert (history(tmp_path, "distant_mrr", 8), history(tmp_path, "mrr", 8)) == ({8: 0.2}, {6: 0.9, 8: 0.1})
    assert find_best(tmp_path / "checkpoints", "distant_mrr")[1].step == 8
    assert find_best(tmp_path / "checkpoints", "mrr")[1].step == 6


def write(run, step, value=0.0):
    state = state_of(step, mrr=1.0 / step)
    contents = {"encoder.safetensors": {"weight": torch.full((40,), value)}}
    return checkpoint.read_state(checkpoint.save(run / "checkpoints", state, contents))


def follow(run, state, score, choice="x"):
    line = ScoreLine(step=state.step, checkpoint=state.identity, choice=choice, score=score, tasks={}, test={})
    append_score(run, line)


def best_of(run):
    found = find_best(run / "checkpoints", FOLLOWED)
    return None if found is None else found[1].step


def test_the_best_is_the_followers(tmp_path):
    states = [write(tmp_path, step, step) for step in (2, 4, 6, 8)]
    assert best_of(tmp_path) is None
    assert unscored(tmp_path / "checkpoints", FOLLOWED) == [2, 4, 6, 8]
    for state, score in zip(states, (50.0, 60.0, 60.0, None), strict=True):
        follow(tmp_path, state, score)
    assert best_of(tmp_path) == 4
    assert unscored(tmp_path / "checkpoints", FOLLOWED) == [8]
    assert history(tmp_path, FOLLOWED, 4) == {2: 50.0, 4: 60.0}
    write(tmp_path, 4, -1.0)  # taken again, other weights: a checkpoint without a score
    assert best_of(tmp_path) == 6
    follow(tmp_path, states[3], 10.0, choice="y")
    assert best_of(tmp_path) == 8, "scores of another choice are not comparable: the newest line's counts"
    assert history(tmp_path, FOLLOWED, 8) == {8: 10.0}
    assert find_best(tmp_path / "checkpoints", "mrr")[1].step == 2


def test_checkpoint_is_kept_until_its_score_is_known(tmp_path):
    config = CheckpointConfig(keep_last=1)

    def prune(newest):
        retention.prune(tmp_path / "checkpoints", config, FOLLOWED, newest)
        return checkpoint.steps_in(tmp_path / "checkpoints")

    first = write(tmp_path, 2)
    with scoring(tmp_path, 2):
        write(tmp_path, 4)
        assert prune(4) == [2, 4]
        write(tmp_path, 6)
        assert prune(6) == [2, 6]
        retention.prune(tmp_path / "checkpoints", config, "mrr", 6)
        assert checkpoint.steps_in(tmp_path / "checkpoints") == [2, 6], "by mrr it is the best"
        follow(tmp_path, first, 50.0)
    assert prune(6) == [2, 6]
    follow(tmp_path, checkpoint.read_state(tmp_path / "checkpoints" / "step-00000006"), 51.0)
    assert prune(6) == [6]
    (tmp_path / "scoring.json").write_text('{"st')  # names nothing, and harms nothing
    assert prune(6) == [6]


def config_of(**changes):
    return runs.least_config(**{"export": "best"} | changes)


def test_patience_is_no_part_of_a_runs_identity_and_the_score_is():
    saving = {"every_steps": 100}
    plain, patient = config_of(checkpoint=saving), config_of(checkpoint=saving, validation={"patience": 3})
    assert plain.hash() == patient.hash()
    assert plain.resume_settings()["validation"]["score"] == "distant_recall_at_1"
    assert "patience" not in plain.resume_settings()["validation"]
    assert plain.hash() != config_of(validation={"score": "followed"}).hash()


def test_a_follower_needs_no_validation_of_ours():
    validation = {"score": "followed", "every_steps": 0, "patience": 3}
    assert config_of(validation=validation, checkpoint={"every_steps": None}).validation.patience == 3
    with pytest.raises(ValueError, match="needs export = best"):
        config_of(validation=validation, export="last")


def test_followed_run_at_an_address_is_refused():
    with pytest.raises(ValueError, match=all_of("followed", "folder", "s3://bucket/run")):
        config_of(run="s3://bucket/run", validation={"score": "followed"})


def test_an_objective_without_scores_needs_a_folder_only_if_scores_choose(monkeypatch):
    monkeypatch.setattr(type(config_of().objective), "scores", ())
    remote = {"run": "s3://bucket/run", "validation": {"every_steps": 0}}
    assert not config_of(**remote, export="last").awaits_follower
    with pytest.raises(ValueError, match=all_of("folder", "s3://bucket/run", "run")):
        config_of(**remote)
