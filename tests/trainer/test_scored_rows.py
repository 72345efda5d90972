"""The rows that a validation scores: named by content, checked before the start, without copies."""

import random
import shutil

import numpy as np
import pytest
import tinyruns as runs
from messages import says
from preparing import make_pair, prepare_rows
from textruns import LABELS, SCL, write_texts
from tinyruns import problems

from declutr.cli.main import main
from declutr.common.errors import CheckpointError, TrainingFailedError
from declutr.pipeline.shards.shards import ShardSet, document_keys
from declutr.trainer.checkpoints.checkpoint import steps_in
from declutr.trainer.config import TrainConfig
from declutr.trainer.driver.checks import corpora_remarks, resolve
from declutr.trainer.driver.supervisor import Signals, Supervisor
from declutr.trainer.objectives.scores import held_out_rows
from declutr.trainer.train import run_training

LOCAL = {"num_workers": 0}


def texts(seed, number):
    rng = random.Random(seed)
    return [" ".join(rng.choices("abcdefghij", k=rng.randint(90, 200))) for _ in range(number)]


def shards(folder, seed=1, number=60, rows=None, **settings):
    """Documents of the seed, with one tokenizer for all seeds."""
    rows = [{"text": text} for text in rows or texts(seed, number)]
    settings = {"geometry": runs.GEOMETRY, "texts": texts(0, 50), "validation_fraction": 0.1} | settings
    return prepare_rows(folder, "documents", rows, **settings)[0]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return shards(tmp_path_factory.mktemp("scored") / "data")


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A run that validates on other shards and on judged pairs."""
    top = tmp_path_factory.mktemp("finished")
    write_texts(top)
    config = with_validation(data, top / "run", data=shards(top / "other", 2, validation_fraction=0.0), stsb=top)
    run_training(config)
    return config, top


def with_validation(trained, run, **places):
    validation = {"every_steps": 2} | {key: str(place) for key, place in places.items()}
    return runs.train_config(trained, run, steps=2, scaling=LOCAL, validation=validation)


@pytest.mark.slow
def test_moved_rows_continue_a_run_and_other_rows_in_their_place_are_refused(data, finished, tmp_path):
    config, top = finished
    moved = shutil.copytree(top, tmp_path / "moved")
    places = {"data": moved / "other" / "out", "stsb": moved}
    assert problems(with_validation(data, top / "run", **places)) == []

    pairs = (moved / "sts-dev.csv").read_text()
    (moved / "sts-dev.csv").write_text(pairs.replace("\t4.", "\t3."))
    says(problems(with_validation(data, top / "run", **places)), "validation.stsb was", "another configuration")
    (moved / "sts-dev.csv").write_text("nothing")
    (only,) = problems(with_validation(data, top / "run", **places))
    says(only, "validation.stsb", "line 1")

    places["stsb"] = top
    shutil.rmtree(moved / "other")
    shards(moved / "other", seed=3, validation_fraction=0.0)
    says(problems(with_validation(data, top / "run", **places)), "validation.data was", "another configuration")
    assert problems(config) == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"geometry": {"num_anchors": 2, "max_tokens": 8}}, ("spans.max_tokens = 16", "at most 8")),
        ({"short_documents": "shrink_spans"}, ("short_documents = shrink_spans", "with drop", "prepare both alike")),
        ({"geometry": {"num_anchors": 1, "max_tokens": 16}}, ()),
    ],
)
def test_other_shards_that_the_spans_do_not_fit_are_refused_by_name(data, tmp_path, settings, told):
    other = shards(tmp_path / "other", seed=2, validation_fraction=0.0, **settings)
    found = problems(with_validation(data, tmp_path / "run", data=other))
    if told:
        says(found, f"validation.data = {other}", *told)
    else:
        assert found == [], "a validation draws one anchor"


def test_shards_that_are_trained_on_too_or_lack_a_file_are_named_before_the_start(data, tmp_path):
    other = shards(tmp_path / "other", seed=2, validation_fraction=0.0)
    config = with_validation(data, tmp_path / "run", data=other)
    task = {"more": {"data": str(other), "batch_documents": 8, "spans": config.spans.model_dump()}}
    both = type(config).model_validate(config.model_dump() | {"auxiliary_tasks": task})
    says(problems(both), f"validation.data = {other}", "rows that the run trains on")
    shard = next(other.rglob("*.arrow"))
    shard.unlink()
    says(problems(config), "validation.data", shard.name, "missing")


def test_place_that_cannot_be_expanded_is_named_with_its_setting_and_all_others(data, tmp_path):
    for place in ("$UNSET_SHARDS/val", ""):
        found = problems(with_validation(data, tmp_path / "run", data=place, stsb="$UNSET_PAIRS"))
        says(found, f"validation.data = {place}: ")
        says(found, "validation.stsb = $UNSET_PAIRS", "is not set")


def test_run_without_a_checkpoint_takes_other_settings(data, tmp_path):
    """Its loss was not finite in the first steps, and the message says to lower the rate."""
    run = tmp_path / "run"
    with pytest.raises(TrainingFailedError, match=r"optim\.lr"):
        run_training(runs.train_config(data, run, optim={"lr": 1e30}, steps=4, scaling=LOCAL))
    assert not list((run / "checkpoints").glob("step-*"))
    assert run_training(runs.train_config(data, run, steps=2, scaling=LOCAL))["steps"] == 2


def test_copies_in_several_corpora_are_scored_once(tmp_path):
    corpora = {"first": texts(5, 40), "second": texts(5, 40) + texts(6, 20)}
    places = [shards(tmp_path / name, rows=rows, validation_fraction=0.5) for name, rows in corpora.items()]
    held_out = ShardSet(places[0], "held-out", others=places[1:])
    rows = held_out_rows(held_out, 1000, seed=3)
    keys = document_keys(held_out.take(rows))
    assert len(np.unique(keys)) == len(keys)
    assert set(keys) == set(document_keys(held_out.take(np.arange(held_out.num_documents))))
    assert len(rows) < held_out.num_documents


def test_corpora_that_meet_themselves_or_hold_out_other_texts_are_named(tmp_path):
    small = shards(tmp_path / "small", seed=7, number=30)
    other = shards(tmp_path / "other", seed=8, number=200, validation_fraction=0.0)
    corpora = [{"path": str(place), "weight": 1} for place in (small, other)]
    run = resolve(runs.train_config(corpora, tmp_path / "run", steps=40, validation={"every_steps": 5}))
    found = list(corpora_remarks(run, 40))
    assert len(found) == 2
    says(found[0], small, "training documents", "a batch reads 4", "lower batch_documents")
    says(found[1], other, "validation_fraction = 0.0", f"{small} with 0.1")
    assert len(list(corpora_remarks(run, 2))) == 1, "no corpus is read twice"


@pytest.mark.slow
def test_a_share_counts_the_rows_that_it_reads(tmp_path, capsys):
    more, part = shards(tmp_path / "more", seed=9, number=100), tmp_path / "part"
    share = runs.train_values(more, part, steps=2, scaling=LOCAL, data_fraction=0.5)
    run_training(TrainConfig.model_validate(share))
    total, read = (ShardSet(more, "train", part=rows).num_documents for rows in (None, (0.5, 0)))
    says((part / "export" / "README.md").read_text(), f"{read} of {total} training documents")
    path = runs.write_config(tmp_path / "share.yaml", train=share | {"run": str(tmp_path / "planned")})
    assert main(["train", str(path), "--plan"]) == 0
    says(capsys.readouterr().out, f"pass(es) over {read}")


@pytest.mark.slow
def test_score_that_the_rows_do_not_have_ends_the_run_at_its_first_validation(tmp_path):
    rows = [make_pair(f"premise {n // 2}", f"hypothesis {n}", LABELS[1 + n % 2]) for n in range(120)]
    pairs, _ = prepare_rows(tmp_path / "pairs", {"kind": "pairs"}, rows)
    changes = {"export": "best", "validation": {"every_steps": 2, "score": "recall_at_1"}}
    config = runs.train_config(pairs, tmp_path / "run", objective=SCL, scaling=LOCAL, **changes)
    assert problems(config) == []
    with pytest.raises(TrainingFailedError, match="recall_at_1"):
        run_training(config)
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_what_changes_while_a_run_is_up_ends_it_and_costs_no_checkpoint(data, tmp_path):
    """As if a worker died, and the next one found something else: it would begin again at step 0."""
    write_texts(tmp_path)
    own, pairs = shutil.copytree(data, tmp_path / "data"), tmp_path / "sts-dev.csv"
    config, before = with_validation(own, tmp_path / "run", stsb=tmp_path), pairs.read_text()
    run_training(config)
    plan = resolve(config)
    for place in ("validation.stsb", own):
        pairs.write_text(before.replace("\t4.", "\t3.") if place != own else before)
        if place == own:
            shutil.rmtree(own)
            shutil.copytree(shards(tmp_path / "new", seed=4), own)
        with pytest.raises(TrainingFailedError, match=f"{place} on .* differ"):
            Supervisor(plan, Signals(), 0.0, None).run_to_end()
        assert steps_in(tmp_path / "run" / "checkpoints") == [2]


def test_finished_run_without_its_checkpoints_does_not_begin_again(data, tmp_path):
    run = tmp_path / "run"
    config = runs.train_config(data, run, steps=2, scaling=LOCAL, checkpoint={"every_steps": 1})
    run_training(config)
    shutil.rmtree(run / "checkpoints")
    files = [run / name for name in ("metrics.jsonl", "config.yaml", "resume_settings.json")]
    before = [path.read_bytes() for path in files]
    for settings in (config, config.model_copy(update={"seed": 5})):
        with pytest.raises(CheckpointError, match="has finished"):
            run_training(settings)
    assert [path.read_bytes() for path in files] == before


def test_export_outlives_its_checkpoint(data, tmp_path, log):
    """The best checkpoint breaks after the end of the run; the second best does not replace its encoder."""
    best = {"validation": {"every_steps": 1}, "export": "best", "checkpoint": {"every_steps": 1, "keep_last": 4}}
    config = runs.train_config(data, tmp_path / "run", steps=4, scaling=LOCAL, **best)
    step, weights = run_training(config)["exported_step"], tmp_path / "run" / "export" / "model.safetensors"
    before = weights.read_bytes()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    assert run_training(config)["exported_step"] == step
    assert weights.read_bytes() == before
    assert any(f"step {step}, which is gone" in line for line in log)
