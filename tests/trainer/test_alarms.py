"""Alarms of planted failures, none of runs that learn; remarks about a task that is too easy."""

import html
import json
import math
import random
import re

import pytest
import tinyruns as runs
import torch
from messages import says
from preparing import prepare_rows
from tinyruns import least_config as config

from declutr.common.config import config_yaml
from declutr.report.runs import write_runs_page
from declutr.trainer.build import build_parts, build_train_steps
from declutr.trainer.config import TrainConfig
from declutr.trainer.metrics.alarms import Alarms
from declutr.trainer.metrics.metrics import METRICS, MetricsWriter, read_metrics
from declutr.trainer.objectives.scores import uniformity
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.run import RunPlan
from declutr.trainer.step.gradcache import spread

SCD = {"kind": "scd", "projector": [16], "max_tokens": 24, "dropout_rates": [0.0, 0.5], "decorrelation_weight": 0.0}
SIMCSE = {"kind": "simcse", "max_tokens": 24}
SPEED = {"data_wait_share": 0.02}
SETTINGS = {"optim.lr": 0.5, "microbatch_tokens": "auto", "scaling.data_cpus": 2}


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 6))) for _ in range(300)]
    rows = [{"text": " ".join(rng.choices(words, k=rng.randint(6, 20)))} for _ in range(400)]
    return prepare_rows(tmp_path_factory.mktemp("alarms") / "sentences", "sentences", rows)[0]


def train(data, folder, objective=SIMCSE, lr=1e-4, steps=50, speed=SPEED):
    """Trains in this process with the parts of a worker, and writes its metrics as the worker does."""
    changes = {"batch_documents": 16, "optim": {"lr": lr}, "encoder": {"dropout": 0.1}}
    values = runs.train_values(data, folder, steps=steps, objective=objective, **changes)
    del values["spans"]
    run = RunPlan.of(TrainConfig.model_validate(values))
    folder.mkdir()
    (folder / "config.yaml").write_text(config_yaml(run.config))
    (folder / "metrics.jsonl").touch()
    parts, shards, plan = build_parts(run, Communicator(), torch.device("cpu")), run.training_shards[""], run.orders[""]
    [train_step] = build_train_steps(run, parts.tasks, steps)
    writer = MetricsWriter(folder, 0, Alarms({"": run.config.objective}, SETTINGS | {"optim.lr": lr}, 8192.0))
    for step in range(1, steps + 1):
        epochs, rows = plan.documents(step - 1, step)
        batch = parts.collators[""].collate(shards.take(rows), epochs)
        writer.add("step", step, train_step.step({"": batch}, step).line() | speed)
    writer.close()
    return [line for line in read_metrics(folder) if line["kind"] == "alarm"]


LOWER = ["Lower objective.repulsion_weight (now 1.0)", "lower optim.lr (now 0.02)"]
STARVING = ["waited for data 75%", "Increase scaling.data_cpus (now 2)"]
MEMORY = ["memory: the first worker had 7,900 of 8,192 MiB", "Lower microbatch_tokens (now auto)"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "planted", "facts"),
    [
        ("collapse", {"objective": SCD, "lr": 0.02}, LOWER),
        ("starving", {"steps": 30, "speed": {"data_wait_share": 0.75}}, STARVING),
        ("memory", {"steps": 5, "speed": SPEED | {"peak_memory_mib": 7900.0}}, MEMORY),
    ],
)
def test_a_planted_failure_is_named_once_with_its_remedy(sentences, tmp_path, log, cause, planted, facts):
    """In the metrics, in the log, and as a sentence at the head of the run's page."""
    (alarm,) = [line for line in train(sentences, tmp_path / "run", **planted) if line["alarm"] == cause]
    assert alarm["step"] <= 50
    assert alarm["figure"] != alarm["limit"]
    assert len([line for line in log if alarm["text"].partition(": ")[2] in line]) == 1
    head = write_runs_page([tmp_path / "run"]).read_text().partition("Losses")[0]
    sentences_of_page = [html.unescape(text) for text in re.findall(r'<li class="alarm">(.*?)</li>', head)]
    assert sentences_of_page.count(alarm["text"]) == 1
    for part in (f"step {alarm['step']}: ", f"{cause}: ", *facts):
        assert part in alarm["text"]


@pytest.mark.slow
def test_runs_that_learn_raise_no_alarm(sentences, tmp_path):
    scd = {**SCD, "dropout_rates": [0.05, 0.155], "decorrelation_weight": 0.2, "repulsion_weight": 0.05}
    for number, objective in enumerate((SIMCSE, scd)):
        assert train(sentences, tmp_path / str(number), objective, 1e-3) == []


def line_of(step, **values):
    return {"kind": "step", "step": step, **values}


def alarms(settings=SETTINGS, memory=0.0, own=None, **auxiliary):
    """Alarms of a run of SimCSE, or of its own objective, with auxiliary tasks."""
    tasks = {"": own or {"kind": "simcse"}} | auxiliary
    objectives = {name: config(objective=values).objective for name, values in tasks.items()}
    return Alarms(objectives, settings, memory)


def alarms_at(watched, lines):
    return [alarm for line in lines for alarm in watched.add(line)]


def test_alarms_of_a_resumed_run_are_not_given_again(tmp_path):
    """A start that is validated again gives its alarm again."""
    lines = [line_of(step, data_wait_share=0.9, loss=1.0) for step in range(1, 40)]
    first = alarms_at(alarms(), lines)
    assert [(alarm["alarm"], alarm["step"]) for alarm in first] == [("starving", 24)]
    lines.insert(24, first[0])
    second = alarms()
    second.replay(lines)
    assert second.add(line_of(40, data_wait_share=0.9, loss=1.0)) == []
    assert [alarm["alarm"] for alarm in second.add(line_of(41, data_wait_share=0.9, skipped=True))] == ["non_finite"]
    lines = [{"kind": "validation", "step": 0, "uniformity": -0.05}]
    lines += [{"kind": "alarm", "step": 0, "alarm": "collapse", "text": "collapsed"}, line_of(10, loss=1.0)]
    for after_step, alarmed in ((0, 0), (10, 1)):
        (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        watched = alarms()
        MetricsWriter(tmp_path, after_step, watched, validates_again=after_step == 0).close()
        assert len([line for line in read_metrics(tmp_path) if line["kind"] == "alarm"]) == alarmed
        assert bool(watched._past_causes) == bool(alarmed)


def test_uniformity_alarms_near_0_if_it_was_lower():
    quiet = [-0.1] * 10 + [-2.0] * 20, [-2.0, -0.02] * 15, [None] * 30, [-0.1] * 30  # the last: in a narrow cone
    for values in (*quiet, [-2.0] * 10 + [-0.02] * 20, [-0.12] * 10 + [-0.03] * 20):
        lines = [line_of(step, batch_uniformity=value) for step, value in enumerate(values)]
        assert [alarm["alarm"] for alarm in alarms_at(alarms(), lines)] == ["collapse"] * (values not in quiet), values


def test_rank_of_held_out_rows_alarms_and_that_of_labelled_clips_does_not():
    held_out = alarms()
    assert held_out.add({"kind": "validation", "step": 0, "uniformity": -1.5, "effective_rank": 30.0}) == []
    (alarm,) = held_out.add({"kind": "validation", "step": 9, "uniformity": -1.0, "effective_rank": 9.0})
    assert (alarm["alarm"], alarm["figure"], alarm["limit"]) == ("collapse", 9.0, pytest.approx(10.5))
    lines = [line_of(step, image_batch_participation_ratio=90.0 if step < 20 else 9.0) for step in range(60)]
    assert alarms_at(alarms(image={"kind": "supcon"}), lines) == []
    # embeddings that nothing trains raise none either
    lines = [{"kind": "validation", "step": step, "uniformity": -2.0 + step, "effective_rank": 9.0} for step in (0, 2)]
    for terms, causes in (("mlm", []), ("both", ["collapse"])):
        assert [alarm["alarm"] for alarm in alarms_at(alarms(own={"terms": terms}), lines)] == causes


def test_updates_that_were_left_out_and_full_memory_are_alarms_of_their_lines():
    watched = alarms(memory=1000.0, image={"kind": "supcon"})
    assert watched.add(line_of(1, skipped=False, image_skipped=False, peak_memory_mib=949.0)) == []
    (alarm,) = watched.add(line_of(2, skipped=False, image_skipped=True, peak_memory_mib=950.0))
    says(alarm["text"], "not finite", "of the task image", "Lower optim.lr (now 0.5)")
    own = SETTINGS | {"auxiliary_tasks.image.optim.lr": 0.25}
    for name, rate in (("image_", "auxiliary_tasks.image.optim.lr (now 0.25)"), ("", "optim.lr (now 0.5)")):
        (alarm,) = alarms(own, image={"kind": "supcon"}).add(line_of(2, **{f"{name}skipped": True}))
        says(alarm["text"], f"Lower {rate}")
    (alarm,) = watched.add(line_of(3, skipped=True, peak_memory_mib=951.0))
    assert (alarm["alarm"], alarm["step"], alarm["figure"], alarm["limit"]) == ("memory", 3, 951.0, 950.0)


def test_a_remedy_for_an_auxiliary_task_names_its_own_settings():
    lines = [line_of(step, text_batch_uniformity=-2.0 if step < 10 else 0.0) for step in range(20)]
    settings = [f"auxiliary_tasks.text.objective.{key}" for key in ("repulsion_weight", "decorrelation_weight")]
    for own, rate in (
        ({"auxiliary_tasks.text.optim.lr": 0.25}, "auxiliary_tasks.text.optim.lr (now 0.25)"),
        ({}, "0.5"),
    ):
        (alarm,) = alarms_at(alarms(SETTINGS | own, text=SCD), lines)
        says(alarm["text"], "the task text", settings, rate)


def test_spread_is_that_of_the_covariance():
    views = torch.randn(40, 2, 12, generator=torch.Generator().manual_seed(0)) + 1
    values = torch.linalg.eigvalsh(torch.cov(torch.nn.functional.normalize(views[:, 0].double(), dim=-1).T))
    expected = uniformity(views[:, 0]), float(values.sum() ** 2 / values.square().sum())
    assert spread(views).tolist() == pytest.approx(expected, rel=1e-4)
    assert spread(views.expand(40, 2, 12)[:1]).isnan().all()
    assert spread(views[:1].expand_as(views) + 1e-6 * views)[0] == pytest.approx(0, abs=1e-3)


def test_batch_smaller_than_the_papers_is_remarked():
    def small_batch(**settings):
        run = config(**settings)
        return run.objective.remark_before(run.main.context("drop"))

    assert small_batch() is None
    remark = small_batch(batch_documents=8)
    says(remark, "batch_documents = 8", "7 other documents", "15")
    assert "Increase batch_documents" in remark
    assert small_batch(batch_documents=8, objective={"terms": "mlm"}) is None
    assert small_batch(batch_documents=8, objective={"queue_size": 64}) is None


def test_first_loss_far_below_guessing_is_remarked():
    def easy_start(loss, **settings):
        run = config(**settings)
        return run.objective.remark_after_first_step(run.main.context("drop"), {"contrastive": loss, "mlm": 0.0})

    remark = easy_start(0.117)
    says(remark, "0.117", "4.14")
    says(remark, "batch_documents (now 16)", "spans.strategy=distant", "spans.num_anchors=1")
    assert "strategy" not in easy_start(0.117, spans={"strategy": "distant"})
    assert easy_start(0.0, batch_documents=1, spans={"num_anchors": 1}) is not None
    assert easy_start(math.log(63)) is easy_start(0.42) is None
    assert easy_start(0.0, objective={"terms": "mlm"}) is None
    assert easy_start(0.1, objective={"reference_rank_scaling": 4}) is None
