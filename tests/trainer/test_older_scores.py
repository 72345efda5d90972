"""A run that began when `recall_at_1` was the default score: its files, as commit a16d325 wrote them, in `data`."""

import json
import shutil
from pathlib import Path

import pytest
import tinyruns as runs
import torch
import yaml
from states import state_of

from common.config import config_yaml
from common.storage import read_json, write_json
from trainer.checkpoints import checkpoint
from trainer.checkpoints.ranking import EarlyStopping, find_best, history
from trainer.driver.checks import _run_problems
from trainer.driver.original_score import with_original_score
from trainer.parallel.world import Request
from trainer.setup.config import TrainConfig

WRITTEN = Path(__file__).parent / "data" / "recall_run"
STEP_2_IS_BEST = {2: 0.05, 4: 0.05, 6: 0.05}
DISTANT = "distant_recall_at_1"


def refused(config, run):
    return _run_problems(with_original_score(config, run), run)


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(WRITTEN, tmp_path / "run"))


def config_of(run, **changes):
    """The configuration that the run has always had, which names no score."""
    settings = {**runs.FINISHED, "steps": 6, "export": "best"} | changes
    return runs.train_config("d", run, **settings)


def test_it_keeps_its_score_and_with_it_its_identity(run):
    config = config_of(run)
    assert config.validation.score == DISTANT
    assert with_original_score(config, run).validation.score == "recall_at_1"
    assert with_original_score(config, run).decisive() == read_json(run / "decisive.json")
    assert with_original_score(config, run).hash() == read_json(run / "state.json")["config_hash"]
    assert refused(config, run) == []
    assert with_original_score(config, run.parent / "new") == config
    assert config.decisive()["validation"]["score"] == DISTANT


@pytest.mark.parametrize("damage", [None, "", "[]", "{}", '{"validation": 3}'])
def test_its_checkpoints_tell_its_score_where_no_file_does(run, damage):
    contents = {"encoder.safetensors": {"weight": torch.zeros(2)}}
    state = checkpoint.save(run / "checkpoints", state_of(6), contents) / "state.json"
    write_json(state, read_json(state) | {"config_hash": read_json(run / "state.json")["config_hash"]})
    (run / "decisive.json").unlink()
    if damage is not None:
        (run / "decisive.json").write_text(damage)
    assert with_original_score(config_of(run), run).validation.score == "recall_at_1"
    assert with_original_score(config_of(run, seed=1), run).validation.score == DISTANT, "another configuration"
    state.write_text("")
    assert with_original_score(config_of(run), run).validation.score == DISTANT


def test_a_score_that_is_named_is_not_replaced(run):
    named = config_of(run, validation={"every_steps": 2, "score": DISTANT})
    (problem,) = refused(named, run)
    assert f"validation.score was 'recall_at_1', now '{DISTANT}'" in problem
    assert "--fork NEW_RUN" in problem
    former = config_of(run, validation={"every_steps": 2, "score": "recall_at_1"})
    assert refused(former, run) == []
    shown = TrainConfig.model_validate(yaml.safe_load(config_yaml(with_original_score(config_of(run), run))))
    assert refused(shown, run) == [], "what the run writes as its config.yaml names the score"


@pytest.mark.parametrize("score", ["mrr", DISTANT])
def test_a_run_of_another_score_is_compared_as_ever(run, score):
    begun = read_json(run / "decisive.json")
    begun["validation"]["score"] = score
    write_json(run / "decisive.json", begun)
    assert with_original_score(config_of(run), run) == config_of(run)
    assert bool(refused(config_of(run), run)) == (score == "mrr")


def test_its_patience_counts_all_its_scores(run):
    config = with_original_score(config_of(run, validation={"every_steps": 2, "patience": 2}), run)
    assert history(run, config.validation.score, 6) == STEP_2_IS_BEST
    patience = EarlyStopping(run, config.validation.score, config.validation.patience)
    patience.resume(4)
    assert patience.request == Request(0)
    patience.measured(6, {"recall_at_1": 0.01, DISTANT: 0.9})
    assert patience.request == Request.EARLY, "6 is the second score after 2 that is no better"


def test_lines_and_checkpoints_without_a_score_do_not_count(run):
    """Those of a fork that goes by another score than the run it comes from."""
    lines = (run / "metrics.jsonl").read_text()
    new = {"kind": "validation", "step": 8, "recall_at_1": 0.1, DISTANT: 0.2, "time": 0.0}
    (run / "metrics.jsonl").write_text(lines + json.dumps(new) + "\n")
    assert history(run, DISTANT, 8) == {8: 0.2}
    assert history(run, "recall_at_1", 8) == STEP_2_IS_BEST | {8: 0.1}
    for step, scores in {6: {"recall_at_1": 0.9}, 8: {"recall_at_1": 0.1, DISTANT: 0.2}}.items():
        contents = {"encoder.safetensors": {"weight": torch.zeros(2)}}
        checkpoint.save(run / "checkpoints", state_of(step, **scores), contents)
    assert find_best(run / "checkpoints", DISTANT)[1].step == 8
    assert find_best(run / "checkpoints", "recall_at_1")[1].step == 6
