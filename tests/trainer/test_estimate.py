"""`train --plan`: the tokens that a run reads, and its time on real steps."""

import pytest
import tinyruns as runs
from madeup import config_of, shards
from messages import says
from shardfolders import LENGTHS

from declutr.trainer.driver import estimate
from declutr.trainer.driver.estimate import try_steps
from declutr.trainer.train import main


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return shards(tmp_path_factory.mktemp("estimate") / "data")


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch):
    monkeypatch.setattr(estimate, "_SECONDS", 0.5)


def test_a_plan_from_real_steps(data, tmp_path, capsys):
    values = config_of(data, tmp_path / "run", batch_documents=16).model_dump(mode="json")
    path = runs.write_config(tmp_path / "train.yaml", train=values)
    assert main([str(path), "--plan"]) == 0
    shown = capsys.readouterr().out
    says(shown, "6 of 16 documents", "1.68", "57")
    says(shown, "spans of", f"the {sum(LENGTHS) / len(LENGTHS):.0f} tokens of a document")
    assert "validations  none" in shown
    assert [one.name for one in tmp_path.iterdir()] == ["train.yaml"]
    trial = try_steps(runs.resolved(config_of(data, tmp_path / "run", batch_documents=16)))
    # spans of 2 to 4 tokens, and two specials
    assert trial.step_tokens == pytest.approx(16 * 2 * (3 + 2), rel=0.3)
    assert 0 < trial.step_seconds < 60


def test_a_plan_counts_validations_on_judged_pairs_alone(data, tmp_path, capsys):
    pairs = [f"main\tcaptions\t2012\t{number}\t{number % 6}\tone {number}\tother\n" for number in range(20)]
    (tmp_path / "sts-dev.csv").write_text("".join(pairs))
    config = config_of(data, tmp_path / "run", batch_documents=16, validation={"stsb": str(tmp_path), "every_steps": 2})
    path = runs.write_config(tmp_path / "train.yaml", train=config.model_dump(mode="json"))
    assert main([str(path), "--plan"]) == 0
    assert "validations  3 on judged pairs" in capsys.readouterr().out
    assert try_steps(runs.resolved(config)).validation_seconds > 0
