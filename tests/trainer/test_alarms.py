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


def train(data, folder, objective, lr, steps=50, speed=SPEED, seed=0):
    """Trains in this process with the parts of a worker, and writes its metrics as the worker does."""
    changes = {"batch_documents": 16, "optim": {"lr": lr}, "seed": seed, "encoder": {"dropout": 0.1}}
    values = runs.train_values(data, folder, steps=steps, objective=objective, **changes)
    del values["spans"]
    config = TrainConfig.model_validate(values)
    folder.mkdir()
    (folder / "config.yaml").write_text(config_yaml(config))
    (folder / "metrics.jsonl").touch()
    run = RunPlan.of(config)
    parts, shards, plan = build_parts(run, Communicator(), torch.device("cpu")), run.training_shards[""], run.orders[""]
    [train_step] = build_train_steps(run, parts.tasks, steps)
    collator = parts.collators[""]
    settings = SETTINGS | {"optim.lr": lr}
    writer = MetricsWriter(folder, 0, Alarms({"": config.objective}, settings, 8192.0))
    for step in range(1, steps + 1):
        epochs, rows = plan.documents(step - 1, step)
        batch = collator.collate(shards.take(rows), epochs)
        writer.add("step", step, train_step.step({"": batch}, step).line() | speed)
    writer.close()
    return [line for line in read_metrics(folder) if line["kind"] == "alarm"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "planted", "told"),
    [
        (
            "collapse",
            {"objective": SCD, "lr": 0.02},
            ["collapse: ", "Lower objective.repulsion_weight (now 1.0)", "lower optim.lr (now 0.02)"],
        ),
        (
            "starving",
            {"objective": SIMCSE, "lr": 1e-4, "steps": 30, "speed": {"data_wait_share": 0.75}},
            ["starving: ", "waited for data 75%", "Increase scaling.data_cpus (now 2)"],
        ),
        (
            "memory",
            {"objective": SIMCSE, "lr": 1e-4, "steps": 5, "speed": SPEED | {"peak_memory_mib": 7900.0}},
            ["memory: the first worker had 7,900 of 8,192 MiB", "Lower microbatch_tokens (now auto)"],
        ),
    ],
)
def test_a_planted_failure_is_named_once_with_its_remedy(sentences, tmp_path, log, cause, planted, told):
    """In the metrics, in the log, and as a sentence at the head of the run's page."""
    alarms = train(sentences, tmp_path / "run", **planted)
    (alarm,) = [line for line in alarms if line["alarm"] == cause]
    assert alarm["step"] <= 50
    assert alarm["figure"] != alarm["limit"]
    assert len([line for line in log if alarm["text"].partition(": ")[2] in line]) == 1
    head = write_runs_page([tmp_path / "run"]).read_text().partition("Losses")[0]
    sentences_of_page = [html.unescape(one) for one in re.findall(r'<li class="alarm">(.*?)</li>', head)]
    assert sentences_of_page.count(alarm["text"]) == 1
    for part in (f"step {alarm['step']}: ", *told):
        assert part in alarm["text"]


@pytest.mark.slow
def test_runs_that_learn_raise_no_alarm(sentences, tmp_path):
    wanted = {**SCD, "dropout_rates": [0.05, 0.155], "decorrelation_weight": 0.2, "repulsion_weight": 0.05}
    for number, objective in enumerate((SIMCSE, wanted)):
        assert train(sentences, tmp_path / str(number), objective, 1e-3) == []


def line_of(step, **values):
    return {"kind": "step", "step": step, **values}


def objective_of(**values):
    return runs.least_config(objective=values).objective


def test_alarms_of_a_resumed_run_are_not_given_again():
    lines = [line_of(step, data_wait_share=0.9, loss=1.0) for step in range(1, 40)]
    first = Alarms({"": objective_of(kind="simcse")}, SETTINGS)
    found = [alarm for line in lines for alarm in first.add(line)]
    assert [(alarm["alarm"], alarm["step"]) for alarm in found] == [("starving", 24)]
    lines.insert(24, found[0])
    second = Alarms({"": objective_of(kind="simcse")}, SETTINGS)
    second.replay(lines)
    assert second.add(line_of(40, data_wait_share=0.9, loss=1.0)) == []
    assert [alarm["alarm"] for alarm in second.add(line_of(41, data_wait_share=0.9, skipped=True))] == ["non_finite"]


@pytest.mark.parametrize(("after_step", "alarmed"), [(0, 0), (10, 1)])
def test_an_alarm_of_the_start_is_given_once(tmp_path, after_step, alarmed):
    """A start that is validated again gives it again; a later one does not."""
    lines = [{"kind": "validation", "step": 0, "uniformity": -0.05}]
    lines += [{"kind": "alarm", "step": 0, "alarm": "collapse", "text": "collapsed"}, line_of(10, loss=1.0)]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    alarms = Alarms({"": objective_of(kind="simcse")}, SETTINGS)
    MetricsWriter(tmp_path, after_step, alarms, validates_again=after_step == 0).close()
    assert len([line for line in read_metrics(tmp_path) if line["kind"] == "alarm"]) == alarmed
    assert bool(alarms._past_causes) == bool(alarmed)


@pytest.mark.parametrize(
    ("values", "alarmed"),
    [
        ([-0.1] * 30, False),  # a pretrained encoder in a narrow cone
        ([-0.1] * 10 + [-2.0] * 20, False),
        ([-2.0] * 10 + [-0.02] * 20, True),
        ([-2.0, -0.02] * 15, False),
        ([-0.12] * 10 + [-0.03] * 20, True),
        ([None] * 30, False),
    ],
)
def test_uniformity_alarms_near_0_if_it_was_lower(values, alarmed):
    watched = Alarms({"": objective_of(kind="simcse")}, SETTINGS)
    found = [alarm for step, value in enumerate(values) for alarm in watched.add(line_of(step, batch_uniformity=value))]
    assert [alarm["alarm"] for alarm in found] == ["collapse"] * alarmed
    held_out = Alarms({"": objective_of(kind="simcse")}, SETTINGS)
    assert held_out.add({"kind": "validation", "step": 0, "uniformity": -1.5, "effective_rank": 30.0}) == []
    (alarm,) = held_out.add({"kind": "validation", "step": 9, "uniformity": -1.0, "effective_rank": 9.0})
    assert (alarm["alarm"], alarm["figure"], alarm["limit"]) == ("collapse", 9.0, pytest.approx(10.5))
    labelled = Alarms({"": objective_of(kind="simcse"), "image": objective_of(kind="supcon")}, SETTINGS)
    lines = [line_of(step, image_batch_participation_ratio=90.0 if step < 20 else 9.0) for step in range(60)]
    assert [alarm for line in lines for alarm in labelled.add(line)] == []


def test_updates_that_were_left_out_and_full_memory_are_alarms_of_their_lines():
    tasks = {"": objective_of(kind="simcse"), "image": objective_of(kind="supcon")}
    watched = Alarms(tasks, SETTINGS, 1000.0)
    assert watched.add(line_of(1, skipped=False, image_skipped=False, peak_memory_mib=949.0)) == []
    (alarm,) = watched.add(line_of(2, skipped=False, image_skipped=True, peak_memory_mib=950.0))
    says(alarm["text"], "not finite", "of the task image", "optim.lr (now 0.5)")
    (alarm,) = watched.add(line_of(3, skipped=True, peak_memory_mib=951.0))
    assert (alarm["alarm"], alarm["step"], alarm["figure"], alarm["limit"]) == ("memory", 3, 951.0, 950.0)


def test_embeddings_that_nothing_trains_raise_no_alarm():
    lines = [{"kind": "validation", "step": step, "uniformity": -2.0 + step, "effective_rank": 9.0} for step in (0, 2)]
    for terms, causes in (("mlm", []), ("both", ["collapse"])):
        watched = Alarms({"": objective_of(terms=terms)}, SETTINGS)
        assert [alarm["alarm"] for line in lines for alarm in watched.add(line)] == causes


@pytest.mark.parametrize(
    ("own", "lr"), [({"auxiliary_tasks.text.optim.lr": 0.25}, "auxiliary_tasks.text.optim.lr (now 0.25)"), ({}, "0.5")]
)
def test_a_remedy_for_an_auxiliary_task_names_its_own_settings(own, lr):
    tasks = {"": objective_of(kind="simcse"), "text": objective_of(**SCD)}
    watched = Alarms(tasks, SETTINGS | own)
    spread = [-2.0] * 10 + [0.0] * 10
    lines = [line_of(step, text_batch_uniformity=value) for step, value in enumerate(spread)]
    (alarm,) = [alarm for line in lines for alarm in watched.add(line)]
    settings = [f"auxiliary_tasks.text.objective.{key}" for key in ("repulsion_weight", "decorrelation_weight")]
    says(alarm["text"], "the task text", settings, lr)


def test_spread_is_that_of_the_covariance():
    views = torch.randn(40, 2, 12, generator=torch.Generator().manual_seed(0)) + 1
    unit = torch.nn.functional.normalize(views[:, 0].double(), dim=-1)
    values = torch.linalg.eigvalsh(torch.cov(unit.T))
    expected = uniformity(views[:, 0]), float(values.sum() ** 2 / values.square().sum())
    assert spread(views).tolist() == pytest.approx(expected, rel=1e-4)
    assert spread(views.expand(40, 2, 12)[:1]).isnan().all()
    alike = views[:1].expand_as(views) + 1e-6 * views
    assert spread(alike)[0] == pytest.approx(0, abs=1e-3)


def small_batch(run):
    return run.objective.remark_before(run.main.context("drop"))


def easy_start(run, loss):
    return run.objective.remark_after_first_step(run.main.context("drop"), {"contrastive": loss, "mlm": 0.0})


def test_batch_smaller_than_the_papers_is_remarked():
    assert small_batch(config()) is None
    remark = small_batch(config(batch_documents=8))
    says(remark, "batch_documents = 8", "7 other documents", "15")
    assert "Increase batch_documents" in remark
    assert small_batch(config(batch_documents=8, objective={"terms": "mlm"})) is None
    assert small_batch(config(batch_documents=8, objective={"queue_size": 64})) is None


@pytest.mark.parametrize(
    ("given", "loss", "remarked"),
    [
        ({}, 0.117, True),
        ({}, math.log(63), False),
        ({}, 0.42, False),
        ({"batch_documents": 1, "spans": {"num_anchors": 1}}, 0.0, True),
        ({"objective": {"terms": "mlm"}}, 0.0, False),
        ({"objective": {"reference_rank_scaling": 4}}, 0.1, False),
    ],
)
def test_first_loss_far_below_guessing_is_remarked(given, loss, remarked):
    remark = easy_start(config(**given), loss)
    assert (remark is not None) == remarked


def test_the_remark_names_what_to_change():
    remark = easy_start(config(), 0.117)
    says(remark, "0.117", "4.14")
    says(remark, "batch_documents (now 16)", "spans.strategy=distant", "spans.num_anchors=1")
    assert "strategy" not in easy_start(config(spans={"strategy": "distant"}), 0.117)
