"""Runs over texts and with auxiliary tasks on Ray: prepare, train, kill, continue, other numbers of workers, export."""

import json
import math
import re
import shutil

import pytest
import tinyruns as runs
import torch
from mediafiles import spread
from messages import all_of
from sentence_transformers import SentenceTransformer
from textruns import AUDIO, IMAGE, IMAGES, PAIRS, SCD, SCL, SIMCSE, SOUNDS, clips, pictures, write_texts
from tinyruns import problems

from declutr.common.errors import ConfigError
from declutr.common.storage import hash_file
from declutr.encoders.loading import load_encoder
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.prepare import prepare
from declutr.trainer.checkpoints.checkpoint import find_latest
from declutr.trainer.config import TrainConfig
from declutr.trainer.driver.checks import place_problems
from declutr.trainer.train import train
from declutr.trainer.verify import verify

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("session")]
SUPERVISED = {"kind": "simcse", "supervised": True, "max_tokens": 16}
LONGFORMER = runs.FROM_CONFIG | {"model_type": "longformer", "attention_window": [8, 8]}
BRANCHES = ("image", "audio", "pairs")
SOURCES = {"sentences": "sentences.txt", "pairs": "pairs.jsonl", "images": "pictures", "sounds": "clips"}


@pytest.fixture(scope="module")
def prepared(session, tmp_path_factory):  # noqa: ARG001 - Ray for preparation
    folder = tmp_path_factory.mktemp("tasks")
    write_texts(folder)
    spread(folder / "pictures", pictures())
    spread(folder / "clips", clips())
    for (name, source), content in zip(SOURCES.items(), ("sentences", PAIRS, IMAGES, SOUNDS), strict=True):
        values = runs.prepare_values(folder / source, folder / name, content=content, unit_mib=32)
        for key in ("geometry",) if name in ("sentences", "pairs") else ("geometry", "tokenizer", "record_batch_rows"):
            del values[key]
        if name == "pairs":
            values["tokenizer"] = {"kind": "pretrained", "name": str(folder / "sentences" / "tokenizer")}
        prepare(PipelineConfig.model_validate(values))
    return folder


def values_of(prepared, run, objective=SIMCSE, **changes):
    """Settings of a run over the rows that the objective reads, in this process."""
    pairs = objective["kind"] == "scl" or objective.get("supervised")
    changes = {"encoder": {"dropout": 0.1}, "scaling": {"num_workers": 0}, "steps": 6, **changes}
    values = runs.train_values(prepared / ("pairs" if pairs else "sentences"), run, objective=objective, **changes)
    del values["spans"]
    return values


def tasks_of(prepared, **changes):
    """Settings of an image and an audio task, which take turns with the main one."""
    tasks = {"image": {"data": str(prepared / "images"), **IMAGE}, "audio": {"data": str(prepared / "sounds"), **AUDIO}}
    for name, change in changes.items():
        tasks[name] = tasks.get(name, {}) | change
    return {"auxiliary_tasks": tasks, "task_schedule": "alternating"}


def config_of(*arguments, **changes):
    return TrainConfig.model_validate(values_of(*arguments, **changes))


def all_tasks(prepared, run):
    """The values of a run of SCD, SCL and both media in turns, with a checkpoint every 4 of 12 steps."""
    settings = tasks_of(prepared, pairs={"data": str(prepared / "pairs"), "objective": SCL, "batch_documents": 5})
    settings |= {"checkpoint": {"every_steps": 4, "keep_last": 3}, "validation": {"every_steps": 6}}
    return values_of(prepared, run, SCD, steps=12, **settings)


@pytest.fixture(scope="module")
def finished(prepared, tmp_path_factory):
    run = tmp_path_factory.mktemp("finished") / "run"
    train(TrainConfig.model_validate(all_tasks(prepared, run)))
    return run


@pytest.mark.nightly
def test_a_killed_run_continues_to_the_same_bits(prepared, finished, tmp_path):
    """Frontends, heads, SCD's projector with its statistics, SCL's classifier, four optimizers and streams."""
    killed = tmp_path / "killed"
    values = all_tasks(prepared, killed)
    config = runs.write_config(tmp_path / "config.yaml", train=values)
    runs.kill_at_checkpoint(runs.command("declutr.trainer.train", config), killed, 4)
    train(TrainConfig.model_validate(values))
    expected = runs.steps_of(finished)
    assert runs.steps_of(killed) == expected
    assert all(f"{task}_batch_digest" in expected[1] for task in BRANCHES)
    last = [(run / "checkpoints" / "step-00000012").glob("*.safetensors") for run in (finished, killed)]
    files = [{path.name: hash_file(path) for path in paths} for paths in last]
    assert files[0] == files[1]
    task_files = {f"{name}.{part}.safetensors" for name in BRANCHES for part in ("objective", "optimizer")}
    assert task_files | {"image.frontend.safetensors", "audio.frontend.safetensors"} < set(files[0])


def check_elsewhere(export, *places):
    """The embeddings of sentence-transformers are ours, of the export and of other places of the encoder."""
    sentences = ["aba bab", "a longer text of more words than the others", "x"]
    expected = torch.from_numpy(SentenceTransformer(str(export), device="cpu").encode(sentences))
    for place in (export, *places):
        actual = torch.from_numpy(load_encoder(str(place)).encode(sentences))
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_the_export_has_the_encoder_alone(finished):
    check_elsewhere(finished / "export")
    card = (finished / "export" / "README.md").read_text()
    for words in ("SupCon on images (task image", "SupCon on audio (task audio", "embeddings of its patches"):
        assert words in card
    line, scores = runs.steps_of(finished)[12], runs.steps_of(finished, "validation")
    assert {"image_supcon", "audio_supcon", "image_lr", "audio_grad_norm", "pairs_contrastive"} <= set(line)
    assert math.isfinite(line["loss"])
    assert all(0 <= scores[step]["image_nn_accuracy"] <= 1 for step in (0, 6, 12)), "before and after"
    assert set(find_latest(finished / "checkpoints")[1].task_hashes) == {"", *BRANCHES}


@pytest.mark.parametrize(
    ("objective", "pooling", "layers"),
    [(SIMCSE, "cls", 0), (SUPERVISED, "cls", 1), (SCD, "cls", 0), (SCL, "mean", 0)],
    ids=["simcse", "simcse supervised", "scd", "scl"],
)
def test_exports_load_elsewhere_with_equal_embeddings(prepared, tmp_path, objective, pooling, layers):
    """In sentence-transformers, as the export and as the checkpoint; STS-B chooses the best checkpoint."""
    changes = {"encoder": {"dropout": 0.1, "pooling": pooling}, "checkpoint": {"every_steps": 2, "keep_last": 5}}
    changes |= {"validation": {"every_steps": 2, "stsb": str(prepared)}, "export": "best"}
    config = config_of(prepared, tmp_path / "run", objective, **changes)
    assert config.validation.score == "stsb_spearman"
    train(config)
    scores = runs.steps_of(tmp_path / "run", "validation")
    assert all("stsb_spearman" in line and "uniformity" in line for line in scores.values())
    assert all(("recall_at_1" in line) == (config.data.endswith("pairs")) for line in scores.values())
    export = tmp_path / "run" / "export"
    step = json.loads((export / "declutr.json").read_text())["step"]
    assert step == -max((line["stsb_spearman"], -step) for step, line in scores.items() if step)[1]
    check_elsewhere(export, tmp_path / "run" / "checkpoints" / f"step-{step:08}")
    assert len(list(export.glob("*_Dense"))) == layers
    card = (export / "README.md").read_text()
    assert all(part in card for part in (config.objective.method, *config.objective.dropped))


@pytest.mark.dist
@pytest.mark.parametrize("task_schedule", [pytest.param("joint", marks=pytest.mark.nightly), "alternating"])
def test_verify_gradients_of_all_tasks_passes(prepared, tmp_path, task_schedule):
    settings = tasks_of(prepared) | {"task_schedule": task_schedule, "batch_documents": 5}
    for difference in verify(config_of(prepared, tmp_path / "run", SCD, **settings), 5, [2]):
        assert difference.within, difference
        if difference.case.precision == "float64":
            assert difference.relative < 1e-10, difference


WRONG_TASKS = [
    ("image", {"batch_documents": 500}, r"batch_documents = 500: the shards hold only \d+ training"),
    ("image", {"objective": SIMCSE}, r"objective.kind = simcse reads sentences"),
    ("image", {"objective": {"kind": "declutr"}}, "objective.kind = declutr reads documents"),
    ("image", {"data": "nowhere"}, "data = nowhere"),
    ("image", {"frontend": {"image_size": 20, "patch_size": [8, 8]}}, "frontend.image_size = 20: must be a multiple"),
    ("audio", {"frontend": {"patch_size": [8, 40]}}, r"frontend.patch_size = \[8, 40\]: the shards have 20 mel"),
    ("audio", {"frontend": {"pretrained": "x"}}, "frontend.pretrained: a ViT reads images, not sounds"),
    ("image", {"frontend": {"pretrained": "/nowhere/vit"}}, ".*nowhere"),
    ("more", {"data": "sentences", "objective": SIMCSE, "frontend": {"image_size": 16}}, "frontend.*sentences.*patch"),
]


@pytest.mark.parametrize(("task", "change", "message"), WRONG_TASKS)
def test_problems_of_tasks_are_found_before_ray_starts(prepared, tmp_path, task, change, message):
    if change.get("data") == "sentences":
        change = change | {"data": str(prepared / "sentences")}
    lines = problems(config_of(prepared, tmp_path / "run", **tasks_of(prepared, **{task: change})))
    assert sum(re.search(rf"auxiliary_tasks\.{task}\.?{message}", line) is not None for line in lines) == 1, lines


def test_places_of_tasks_are_checked_first():
    auxiliary_tasks = {"image": {"data": "nowhere"}, "more": {"data": "d", "objective": {"kind": "nobodys"}}, "odd": 5}
    first, *lines = place_problems({"data": "missing", "auxiliary_tasks": auxiliary_tasks})
    assert first.startswith("data = missing: ")
    settings = ["image.data = nowhere", "more.data = d", "more.objective nobodys"]
    assert [line.partition(": ")[0] for line in lines] == [f"auxiliary_tasks.{setting}" for setting in settings]


def test_settings_of_tasks_that_have_no_effect_are_refused_and_the_place_of_data_is_none_of_a_runs_identity(
    prepared, tmp_path
):
    joint = tasks_of(prepared, image={"optim": {"lr": 1e-4}}) | {"task_schedule": "joint"}
    for settings, facts in (
        (joint, ("auxiliary_tasks.image.optim", "no effect", "task_schedule = joint")),
        ({"task_schedule": "alternating"}, ("task_schedule = alternating", "no effect", "auxiliary_tasks")),
    ):
        with pytest.raises(ValueError, match=all_of(facts)):
            config_of(prepared, tmp_path / "run", **settings)
    shutil.copytree(prepared / "images", tmp_path / "copy")
    tasks = [tasks_of(prepared, image={"data": str(place)}) for place in (prepared / "images", tmp_path / "copy")]
    here, elsewhere = (config_of(prepared, tmp_path / "run", **task) for task in tasks)
    assert elsewhere.hash() == here.hash()


DROPOUT = {"dropout": 0.1}
PROJECTED = {"encoder": DROPOUT | {"projection": {"kind": "mlp", "size": 16}}}
NO_HARD = SUPERVISED | {"hard_negatives": False}
NO_WEIGHTS = SCD | {"repulsion_weight": 0, "decorrelation_weight": 0}
BEST = {"validation": {"every_steps": 2}, "checkpoint": {"every_steps": 2}, "export": "best"}
WRONG_TEXTS = [
    (
        "sentences",
        {"objective": SCL},
        "scl reads pairs; data = .* holds sentences: prepare it with content.kind=pairs, or",
    ),
    ("pairs", {"objective": SCD}, "scd reads sentences; data = .* holds pairs"),
    ("sentences", {"objective": SUPERVISED}, "objective.supervised = true: the shards hold sentences"),
    ("pairs", {"objective": SIMCSE}, "objective.supervised = false: the shards hold pairs"),
    ("sentences", {"encoder": {"dropout": 0.0}}, "the two views of objective simcse would be equal"),
    ("sentences", {"encoder": {"dropout": 1e-12}}, "the two views .* would be equal"),  # below 2^-32 nothing is dropped
    ("sentences", {"objective": SCD, "batch_documents": 1}, "need at least 2 sentences"),
    ("sentences", {"batch_documents": 1}, "batch_documents = 1: .* at least 2"),
    ("pairs", {"batch_documents": 1, "objective": NO_HARD}, "batch_documents = 1: .* at least 2"),
    ("sentences", {"objective": SCD, "batch_documents": 1000}, "a batch must not contrast one of them with itself"),
    ("pairs", {"objective": SUPERVISED, **PROJECTED}, "mlp: the layers that objective simcse exports would follow"),
    ("sentences", {"objective": SCD, "encoder": {"from_config": LONGFORMER}}, "longformer .*rate of the whole model"),
    ("sentences", {"encoder": DROPOUT | {"from_config": LONGFORMER}}, "torch's generator.*encoder.attention_dropout=0"),
    ("sentences", {"objective": NO_WEIGHTS}, "repulsion_weight and decorrelation_weight are 0"),
    ("sentences", {"objective": SIMCSE | {"max_tokens": 400}}, "max_tokens = 400: the encoder has positions for"),
    ("sentences", BEST, "score = recall_at_1: sentences do not have this score; set validation.stsb"),
    ("sentences", {"objective": {"kind": "declutr"}}, "documents; data = .* sentences: .* with content.kind=documents"),
    ("documents", {}, "simcse reads sentences, triples or pairs; data = .* content.kind=sentences"),
    ("images", {}, "the main task.*texts"),
    ("sentences", {"validation": {"every_steps": 2, "stsb": "nowhere"}}, "sts-dev.csv"),
    ("sentences", {"validation": {"every_steps": 2, "data": "sentences"}}, "these are the rows"),
    ("sentences", {"validation": {"every_steps": 2, "data": "documents"}}, "which objective simcse cannot score"),
]


@pytest.mark.parametrize(("rows", "changes", "message"), WRONG_TEXTS)
def test_problems_of_text_runs_are_found_before_ray_starts(prepared, data, tmp_path, rows, changes, message):
    """Documents for an objective over texts, for example, would fail in the first validation."""
    folders = {name: str(prepared / name) for name in SOURCES} | {"documents": str(data)}
    if "data" in (validation := changes.get("validation", {})):
        changes = changes | {"validation": validation | {"data": folders[validation["data"]]}}
    lines = problems(config_of(prepared, tmp_path / "run", **changes).model_copy(update={"data": folders[rows]}))
    assert any(re.search(message, line) for line in lines), lines


def test_sentences_are_validation_data_of_pairs_and_unknown_kinds_are_listed(prepared, tmp_path):
    validation = {"every_steps": 2, "data": str(prepared / "sentences")}
    lines = problems(config_of(prepared, tmp_path / "run", SCL, validation=validation))
    assert [line for line in lines if "cannot score" in line] == []
    with pytest.raises((ConfigError, ValueError), match=all_of("declutr", "scd", "scl", "simcse")):
        config_of(prepared, tmp_path / "run", {"kind": "simsce"})
