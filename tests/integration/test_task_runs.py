"""Runs over texts and with auxiliary tasks on Ray: prepare, train, kill, continue, other numbers of workers, export."""

import json
import re
import shutil

import numpy as np
import pytest
import tinyruns as runs
import torch
from mediafiles import png, sound, spread, tone
from messages import all_of, says
from sentence_transformers import SentenceTransformer
from textruns import SCD, SCL, SIMCSE, write_texts
from tinyruns import problems

from declutr.cli.main import main
from declutr.common.errors import ConfigError
from declutr.common.storage import hash_file
from declutr.encoders.loading import load_encoder
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.prepare import prepare
from declutr.trainer.checkpoints.checkpoint import find_latest
from declutr.trainer.driver.path_checks import place_problems
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.train import train
from declutr.trainer.verify import verify

pytestmark = [pytest.mark.ray]
IMAGE = {"objective": {"kind": "supcon"}, "batch_documents": 6, "frontend": {"image_size": 16, "patch_size": [8, 8]}}
AUDIO = {
    "objective": {"kind": "supcon"},
    "batch_documents": 5,
    "frontend": {"patch_size": [8, 8], "mean": -4.0, "std": 4.0},
}
BRANCHES = ("image", "audio", "pairs")


@pytest.fixture(scope="module")
def prepared(session, tmp_path_factory):  # noqa: ARG001 - Ray for preparation
    """Folder with the shards `sentences`, `pairs`, `images` and `sounds`."""
    folder = tmp_path_factory.mktemp("tasks")
    write_texts(folder)
    spread(folder / "pictures", {f"{'abc'[n % 3]}/{n}.png": png(n, (20 + n % 5, 18)) for n in range(40)})
    clips = {f"{n % 4}_{n}.wav": sound(tone(0.1 + 0.01 * (n % 7), 8000, n), 8000) for n in range(36)}
    spread(folder / "clips", clips)
    contents = {
        "sentences": ("sentences.txt", "sentences"),
        "pairs": ("pairs.jsonl", {"kind": "pairs", "required_labels": ["entailment", "contradiction"]}),
        "images": ("pictures", {"kind": "images", "shortest_edge": 18}),
        "sounds": (
            "clips",
            {"kind": "audio", "sample_rate": 8000, "num_mel_bins": 20, "max_seconds": 1, "label": r"^(\d)_"},
        ),
    }
    with_session = runs.prepare_values(folder / "sentences.txt", folder / "sentences")
    for name, (source, content) in contents.items():
        values = with_session | {"output": str(folder / name), "content": content, "unit_mib": 32}
        values["corpus"] = {"kind": "files", "paths": [str(folder / source)]}
        del values["geometry"]
        if name == "pairs":
            values["tokenizer"] = {"kind": "pretrained", "name": str(folder / "sentences" / "tokenizer")}
        elif name != "sentences":
            values = {key: values[key] for key in ("output", "corpus", "content", "validation_fraction", "unit_mib")}
        prepare(PipelineConfig.model_validate(values))
    return folder


def values_of(prepared, run, objective=SIMCSE, task_schedule="alternating", **changes):
    auxiliary_tasks = {
        "image": {"data": str(prepared / "images"), **IMAGE},
        "audio": {"data": str(prepared / "sounds"), **AUDIO},
    }
    changes = {
        "encoder": {"dropout": 0.1},
        "scaling": {"num_workers": 0},
        "steps": 6,
        "objective": objective,
        "auxiliary_tasks": auxiliary_tasks,
        "task_schedule": task_schedule,
        **changes,
    }
    values = runs.train_values(prepared / "sentences", run, **changes)
    del values["spans"]
    return values


def config_of(*arguments, **changes):
    return TrainConfig.model_validate(values_of(*arguments, **changes))


def files_of(checkpoint):
    return {path.name: hash_file(path) for path in sorted(checkpoint.glob("*.safetensors"))}


def all_tasks(prepared, run, task_schedule, **settings):
    """The values of a run of SCD, SCL and both media, with a checkpoint every 4 of 12 steps."""
    settings |= {"steps": 12, "checkpoint": {"every_steps": 4, "keep_last": 3}}
    found = values_of(prepared, run, SCD, task_schedule, **settings)
    found["auxiliary_tasks"]["pairs"] = {"data": str(prepared / "pairs"), "objective": SCL, "batch_documents": 5}
    return found


@pytest.mark.nightly
@pytest.mark.usefixtures("session")
def test_other_numbers_of_workers_read_the_same_batches(prepared, tmp_path, capsys):
    """This process alone, from step 4 three workers, from step 8 two; compared with this process throughout."""
    run = finished = tmp_path / "whole"
    train(TrainConfig.model_validate(all_tasks(prepared, finished, "joint")))
    for workers, done in ((3, 4), (2, 8)):
        run = runs.cut(run, tmp_path / str(workers), done)
        values = all_tasks(prepared, run, "joint", scaling={"num_workers": workers})
        train(TrainConfig.model_validate(values))
        _, state = find_latest(run / "checkpoints")
        assert (state.step, state.world_size) == (12, workers)
    found, expected = runs.steps_of(run), runs.steps_of(finished)
    assert list(found) == list(range(1, 13))
    for step, line in expected.items():
        for name in ("batch_digest", *(f"{task}_batch_digest" for task in BRANCHES)):
            assert found[step][name] == line[name], (step, name)
        assert found[step]["loss"] == pytest.approx(line["loss"], rel=1e-4)
        assert main(["why", str(run), "--step", str(step)]) == 0
        assert capsys.readouterr().out.count("as the run logged it") == 4


def test_a_killed_run_continues_to_the_same_bits(prepared, tmp_path):
    """Frontends, heads, SCD's projector with its statistics, SCL's classifier, four optimizers and streams."""
    finished, killed = tmp_path / "whole", tmp_path / "killed"
    train(TrainConfig.model_validate(all_tasks(prepared, finished, "alternating")))
    values = all_tasks(prepared, killed, "alternating")
    config = runs.write_config(tmp_path / "config.yaml", train=values)
    runs.kill_at_checkpoint(runs.command("declutr.trainer.train", config), killed, 4)
    train(TrainConfig.model_validate(values))
    found, expected = runs.steps_of(killed), runs.steps_of(finished)
    assert found == expected
    assert all(f"{task}_batch_digest" in expected[1] for task in BRANCHES)
    last = [files_of(run / "checkpoints" / "step-00000012") for run in (finished, killed)]
    assert last[0] == last[1]
    task_files = {f"{name}.{part}.safetensors" for name in BRANCHES for part in ("objective", "optimizer")}
    assert task_files | {"image.frontend.safetensors", "audio.frontend.safetensors"} < set(last[0])


def test_the_export_has_the_encoder_alone(prepared, tmp_path):
    config = config_of(prepared, tmp_path / "run", encoder={"dropout": 0.1, "pooling": "cls"})
    train(config)
    export, sentences = tmp_path / "run" / "export", ["aba bab", "a longer text of more words than the others", "x"]
    expected = torch.from_numpy(SentenceTransformer(str(export), device="cpu").encode(sentences))
    torch.testing.assert_close(
        torch.from_numpy(load_encoder(str(export)).encode(sentences)), expected, atol=1e-6, rtol=0
    )
    card = (export / "README.md").read_text()
    for words in ("SupCon on images (task image", "SupCon on audio (task audio", "embeddings of its patches"):
        assert words in card
    line = runs.steps_of(tmp_path / "run")[6]
    assert {"image_supcon", "audio_supcon", "image_lr", "audio_grad_norm", "contrastive"} <= set(line)
    assert np.isfinite(line["loss"])
    _, state = find_latest(tmp_path / "run" / "checkpoints")
    assert set(state.task_hashes) == {"", "image", "audio"}


@pytest.mark.dist
@pytest.mark.parametrize("task_schedule", ["joint", "alternating"])
def test_verify_gradients_of_all_tasks_passes(prepared, tmp_path, task_schedule):
    config = config_of(prepared, tmp_path / "run", SCD, task_schedule, batch_documents=5)
    for difference in verify(config, 5, [2]):
        assert difference.within, difference
        if difference.case.precision == "float64":
            assert difference.relative < 1e-10, difference


WRONG = [
    (
        {"image": {"batch_documents": 500}},
        r"auxiliary_tasks.image.batch_documents = 500: the shards hold only \d+ training",
    ),
    ({"image": {"objective": SIMCSE}}, r"auxiliary_tasks.image.objective.kind = simcse reads sentences"),
    ({"image": {"objective": {"kind": "declutr"}}}, "auxiliary_tasks.image.objective.kind = declutr reads documents"),
    ({"image": {"data": "nowhere"}}, "auxiliary_tasks.image.data = nowhere"),
    (
        {"image": {"frontend": {"image_size": 20, "patch_size": [8, 8]}}},
        "auxiliary_tasks.image.frontend.image_size = 20: must be a multiple",
    ),
    (
        {"audio": {"frontend": {"patch_size": [8, 40]}}},
        r"auxiliary_tasks.audio.frontend.patch_size = \[8, 40\]: the shards have 20 mel",
    ),
    (
        {"audio": {"frontend": {"pretrained": "x"}}},
        "auxiliary_tasks.audio.frontend.pretrained: a ViT reads images, not sounds",
    ),
    ({"image": {"frontend": {"pretrained": "/nowhere/vit"}}}, "auxiliary_tasks.image.*nowhere"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_problems_are_found_before_ray_starts(prepared, tmp_path, changes, message):
    values = values_of(prepared, tmp_path / "run")
    for name, change in changes.items():
        values["auxiliary_tasks"][name] = values["auxiliary_tasks"][name] | change
    found = problems(TrainConfig.model_validate(values))
    assert sum(re.search(message, line) is not None for line in found) == 1, found


@pytest.mark.usefixtures("session")  # else the session would end here, and start again for the next test
def test_places_of_tasks_are_checked_first():
    auxiliary_tasks = {"image": {"data": "nowhere"}, "more": {"data": "d", "objective": {"kind": "nobodys"}}, "odd": 5}
    found = place_problems({"data": "missing", "auxiliary_tasks": auxiliary_tasks})
    assert [line.partition(": ")[0] for line in found] == [
        "data = missing",
        "auxiliary_tasks.image.data = nowhere",
        "auxiliary_tasks.more.data = d",
        "auxiliary_tasks.more.objective nobodys",
    ]


def test_texts_have_no_frontend_and_images_no_main_task(prepared, tmp_path):
    auxiliary_tasks = {
        "more": {"data": str(prepared / "sentences"), "objective": SIMCSE, "frontend": {"image_size": 16}}
    }
    found = problems(config_of(prepared, tmp_path / "run", auxiliary_tasks=auxiliary_tasks))
    says(found, "auxiliary_tasks.more.frontend", "sentences", "patches")
    images = config_of(prepared, tmp_path / "run").model_copy(update={"data": str(prepared / "images")})
    says(problems(images), "the main task", "texts")


def test_settings_that_have_no_effect_are_refused(prepared, tmp_path):
    values = values_of(prepared, tmp_path / "run", task_schedule="joint")
    values["auxiliary_tasks"]["image"]["optim"] = {"lr": 1e-4}
    with pytest.raises(ValueError, match=all_of("auxiliary_tasks.image.optim", "no effect", "task_schedule = joint")):
        TrainConfig.model_validate(values)
    values = values_of(prepared, tmp_path / "run") | {"auxiliary_tasks": {}}
    with pytest.raises(ValueError, match=all_of("task_schedule = alternating", "no effect", "auxiliary_tasks")):
        TrainConfig.model_validate(values)


def test_the_place_of_a_tasks_data_is_no_part_of_a_runs_identity(prepared, tmp_path):
    moved = config_of(prepared, tmp_path / "run")
    shutil.copytree(prepared / "images", tmp_path / "copy")
    elsewhere = moved.model_copy(
        update={
            "auxiliary_tasks": moved.auxiliary_tasks
            | {"image": moved.auxiliary_tasks["image"].model_copy(update={"data": str(tmp_path / "copy")})}
        }
    )
    assert elsewhere.hash() == moved.hash()


LONGFORMER = runs.FROM_CONFIG | {"model_type": "longformer", "attention_window": [8, 8]}
SUPERVISED = {"kind": "simcse", "supervised": True, "max_tokens": 16}


def text_values(prepared, run, objective, **changes):
    data = prepared / ("pairs" if objective["kind"] == "scl" or objective.get("supervised") else "sentences")
    changes = {"encoder": {"dropout": 0.1}, "steps": 6, "objective": objective, **changes}
    values = runs.train_values(data, run, **changes)
    del values["spans"]
    return values


def text_config(*arguments, **changes):
    return TrainConfig.model_validate(text_values(*arguments, **changes))


@pytest.mark.parametrize(
    ("objective", "pooling", "layers"),
    [(SIMCSE, "cls", 0), (SUPERVISED, "cls", 1), (SCD, "cls", 0), (SCL, "mean", 0)],
    ids=["simcse", "simcse supervised", "scd", "scl"],
)
def test_exports_load_elsewhere_with_equal_embeddings(prepared, tmp_path, objective, pooling, layers):
    """In sentence-transformers, as the export and as the checkpoint; STS-B chooses the best checkpoint."""
    config = text_config(
        prepared,
        tmp_path / "run",
        objective,
        encoder={"dropout": 0.1, "pooling": pooling},
        validation={"every_steps": 2, "stsb": str(prepared)},
        checkpoint={"every_steps": 2, "keep_last": 5},
        scaling={"num_workers": 0},
        export="best",
    )
    assert config.validation.score == "stsb_spearman"
    train(config)
    scores = runs.steps_of(tmp_path / "run", "validation")
    assert all("stsb_spearman" in line and "uniformity" in line for line in scores.values())
    assert all(("recall_at_1" in line) == (config.data.endswith("pairs")) for line in scores.values())
    sentences = ["aba bab", "a longer text of more words than the others", "x"]
    export = tmp_path / "run" / "export"
    there = SentenceTransformer(str(export), device="cpu")
    expected = torch.from_numpy(there.encode(sentences))
    found = torch.from_numpy(load_encoder(str(export)).encode(sentences))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert len(list(export.glob("*_Dense"))) == layers
    settings = json.loads((export / "declutr.json").read_text())
    path = tmp_path / "run" / "checkpoints" / f"step-{settings['step']:08}"
    from_checkpoint = torch.from_numpy(load_encoder(str(path)).encode(sentences))
    torch.testing.assert_close(from_checkpoint, expected, atol=1e-6, rtol=1e-6)
    best = max((line["stsb_spearman"], -step) for step, line in scores.items() if step)
    assert settings["step"] == -best[1]
    card = (export / "README.md").read_text()
    assert config.objective.method in card
    assert all(part in card for part in config.objective.dropped)


WRONG_TEXTS = [
    ("sentences", {"objective": SCL}, "scl reads pairs; data = .* holds sentences: prepare it with content.kind=pairs"),
    ("pairs", {"objective": SCD}, "scd reads sentences; data = .* holds pairs"),
    ("sentences", {"objective": SUPERVISED}, "objective.supervised = true: the shards hold sentences"),
    ("pairs", {"objective": SIMCSE}, "objective.supervised = false: the shards hold pairs"),
    (
        "sentences",
        {"objective": SIMCSE, "encoder": {"dropout": 0.0}},
        "the two views of objective simcse would be equal",
    ),
    (
        "sentences",
        {"objective": SIMCSE, "encoder": {"dropout": 1e-12}},  # below 2^-32 nothing is dropped
        "the two views of objective simcse would be equal",
    ),
    ("sentences", {"objective": SCD, "batch_documents": 1}, "need at least 2 sentences"),
    ("sentences", {"objective": SCD, "batch_documents": 1000}, "a batch must not contrast one of them with itself"),
    (
        "pairs",
        {"objective": SUPERVISED, "encoder": {"dropout": 0.1, "projection": {"kind": "mlp", "size": 16}}},
        "encoder.projection.kind = mlp: the layers that objective simcse exports would follow a projection",
    ),
    (
        "sentences",
        {"objective": SCD, "encoder": {"from_config": LONGFORMER}},
        "model type longformer drops some values at a rate of the whole model",
    ),
    (
        "sentences",
        {"objective": SIMCSE, "encoder": {"from_config": LONGFORMER, "dropout": 0.1}},
        "model type longformer drops some values by torch's generator.*set encoder.attention_dropout=0",
    ),
    (
        "sentences",
        {"objective": SCD | {"repulsion_weight": 0, "decorrelation_weight": 0}},
        "repulsion_weight and decorrelation_weight are 0",
    ),
    (
        "sentences",
        {"objective": SIMCSE | {"max_tokens": 400}},
        "objective.max_tokens = 400: the encoder has positions for",
    ),
    (
        "sentences",
        {"objective": SIMCSE, "validation": {"every_steps": 2}, "checkpoint": {"every_steps": 2}, "export": "best"},
        "validation.score = recall_at_1: sentences do not have this score; set validation.stsb",
    ),
    ("sentences", {"objective": {"kind": "declutr"}}, "documents; data = .* sentences: .* with content.kind=documents"),
    ("documents", {"objective": SIMCSE}, "simcse reads sentences, triples or pairs; data = .* content.kind=sentences"),
    ("sentences", {"objective": SIMCSE, "validation": {"every_steps": 2, "stsb": "nowhere"}}, "sts-dev.csv"),
]


@pytest.mark.parametrize(("rows", "changes", "message"), WRONG_TEXTS)
def test_problems_of_text_runs_are_found_before_ray_starts(prepared, data, tmp_path, rows, changes, message):
    objective = changes.pop("objective")
    changes = {"encoder": {"dropout": 0.1}} | changes
    config = text_config(prepared, tmp_path / "run", objective, **changes).model_copy(
        update={"data": str(data if rows == "documents" else prepared / rows)}
    )
    found = problems(config)
    assert any(re.search(message, line) for line in found), found
    changes["objective"] = objective


def test_rows_that_the_run_trains_on_are_no_validation_data(prepared, tmp_path):
    validation = {"every_steps": 2, "data": str(prepared / "sentences")}
    config = text_config(prepared, tmp_path / "run", SIMCSE, validation=validation)
    assert any("these are the rows" in line for line in problems(config))


def test_rows_of_another_schema_are_no_validation_data(prepared, tmp_path, data):
    """Documents for an objective over texts, which had failed in the first validation; sentences for pairs are fine."""
    for objective, scored, problem in ((SIMCSE, data, "which objective simcse"), (SCL, prepared / "sentences", None)):
        config = text_config(prepared, tmp_path / "run", objective, validation={"every_steps": 2, "data": str(scored)})
        found = [line for line in problems(config) if "cannot score" in line]
        assert bool(found) == bool(problem), found
        assert problem is None or problem in found[0]


def test_unknown_kinds_are_listed(prepared, tmp_path):
    with pytest.raises((ConfigError, ValueError), match=all_of("declutr", "scd", "scl", "simcse")):
        text_config(prepared, tmp_path / "run", {"kind": "simsce"})
