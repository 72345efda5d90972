"""Accuracy of nearest neighbours among held-out images and sounds."""

import io

import numpy as np
import pytest
import tinyruns as runs
import torch
from mediafiles import picture, png, sound, stored, tone
from mediashards import prepare_media
from PIL import Image, ImageOps
from textshards import prepare_rows
from tiny import tiny_encoder

from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.driver.run import run_training
from declutr.trainer.driver.summary import neighbours_of
from declutr.trainer.model.config import FrontendConfig
from declutr.trainer.model.frontend import embedding_width
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.supcon.config import MaskConfig, SupconConfig
from declutr.trainer.objectives.supcon.objective import Supcon, nearest_accuracy
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.setup.tasks import new_frontend

AUDIO = {"kind": "audio", "sample_rate": 8000, "num_mel_bins": 20, "max_seconds": 1, "label": None}


def test_nearest_accuracy_counts_neighbours_of_the_same_label_and_ties_as_wrong():
    angles = torch.tensor([0.0, 0.1, 1.0, 1.05, 3.0, 4.0], dtype=torch.float64)
    rows = torch.stack([angles.cos(), angles.sin()], dim=1) * torch.arange(1, 7)[:, None]  # lengths have no effect
    labels = np.array([1, 1, 2, 1, 2, 3])
    # 0 and 1 find each other, 2 and 3 are neighbours of different labels, 4 is nearer to 5, 5 has a label of its own
    assert nearest_accuracy(rows, rows, labels) == pytest.approx(2 / 5)
    equal = torch.ones(6, 2, dtype=torch.float64)
    assert nearest_accuracy(equal, equal, labels) == 0
    assert nearest_accuracy(rows, rows, np.arange(6)) is None
    assert nearest_accuracy(rows, rows, np.zeros(6, np.int64)) is None
    assert nearest_accuracy(rows, rows[[0, 1, 2, 3, 5, 4]], None) == pytest.approx(4 / 6)
    assert nearest_accuracy(equal, equal, None) == 0


def validator_of(folder, manifest, encoder, **settings):
    shards = ShardSet(folder, "held-out")
    config = FrontendConfig(image_size=16, patch_size=(8, 8))
    objective = Supcon(SupconConfig(**settings), RunContext(frontend=config), encoder.embedding_size)
    frontend = new_frontend(config, manifest.content, embedding_width(encoder.model), 0)
    dtype = next(encoder.parameters()).dtype
    return objective.clip_validator(shards, frontend.to(dtype), 30, Communicator(), torch.device("cpu"))


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """Pictures of two classes that any encoder tells apart: dark ones and bright ones."""
    change = {"dark": (0, 60), "bright": (200, 255)}
    files = {
        f"{name}/{number}.png": stored(
            ImageOps.colorize(picture(number, (20, 18)).convert("L"), *((v,) * 3 for v in two))
        )
        for name, two in change.items()
        for number in range(60)
    }
    return prepare_media(tmp_path_factory.mktemp("classes"), {"kind": "images", "shortest_edge": 18}, files)


def test_labels_of_held_out_images_are_found_again_without_augmentation_and_without_a_trace(classes):
    folder, manifest = classes
    encoder = tiny_encoder(dropout=0.1).train()
    before = [parameter.clone() for parameter in encoder.parameters()]
    validator = validator_of(folder, manifest, encoder)
    found = validator.scores(encoder)
    assert found["nn_accuracy"] > 0.9
    assert found == validator.scores(encoder)
    assert encoder.training
    assert all(torch.equal(old, new) for old, new in zip(before, encoder.parameters(), strict=True))
    table = validator.shards.take(validator.rows)
    views = np.frombuffer(b"".join(validator.views(table)["views"].to_pylist()), np.uint8).reshape(-1, 2, 16, 16, 3)
    for raw, (one, other) in zip(table["image"].to_pylist(), views, strict=True):  # no crop, no other colour
        whole = np.asarray(Image.open(io.BytesIO(raw)).resize((16, 16), Image.Resampling.BILINEAR))
        assert (one == whole).all()
        assert (other == whole).all()
    with torch.no_grad():
        next(encoder.parameters()).fill_(torch.nan)
        encoder.model.base_model.encoder.layer[0].output.dense.weight.fill_(torch.nan)
    assert validator.scores(encoder) is None


def test_rows_without_labels_must_find_their_other_view_if_it_differs(tmp_path):
    encoder = tiny_encoder(dropout=0.0)
    clips = {f"{number}.wav": sound(tone(0.1 + 0.01 * (number % 7), 8000, number), 8000) for number in range(40)}
    sounds = prepare_media(tmp_path / "sounds", AUDIO, clips)
    assert validator_of(*sounds, encoder, labels=False) is None
    masks = MaskConfig(time_mask=2, freq_mask=2)
    found = validator_of(*sounds, encoder, labels=False, masks=masks, mixup=0.5).scores(encoder)
    assert 0 < found["nn_accuracy"] <= 1
    images = {f"{number}.png": png(number, (20, 18)) for number in range(40)}
    pictures = prepare_media(tmp_path / "images", {"kind": "images", "shortest_edge": 18, "label": None}, images)
    assert 0 <= validator_of(*pictures, encoder, labels=False).scores(encoder)["nn_accuracy"] <= 1


def test_summary_names_the_accuracy_before_and_after():
    first = {"image_nn_accuracy": 0.25, "mrr": 0.5, "audio_nn_accuracy": None}
    summary = {"first_scores": first, "last_scores": first | {"image_nn_accuracy": 0.75, "audio_nn_accuracy": 0.5}}
    assert neighbours_of(summary) == ["image_nn_accuracy 0.2500 at the start, 0.7500 at the end"]
    assert neighbours_of({"first_scores": {}, "last_scores": {}}) == []


@pytest.mark.slow
def test_run_with_images_has_the_accuracy_before_and_after(classes, tmp_path):
    texts = [{"text": f"words of the sentence {number} and {number % 7} more"} for number in range(60)]
    data, _ = prepare_rows(tmp_path / "sentences", "sentences", texts)
    image = {"data": str(classes[0]), "objective": {"kind": "supcon"}, "batch_documents": 4}
    values = runs.train_values(
        data,
        tmp_path / "run",
        steps=2,
        objective={"kind": "simcse", "max_tokens": 12},
        encoder={"dropout": 0.1},
        auxiliary_tasks={"image": image | {"frontend": {"image_size": 16, "patch_size": [8, 8]}}},
        validation={"every_steps": 2},
        scaling={"num_workers": 0},
    )
    del values["spans"]
    summary = run_training(TrainConfig.model_validate(values))
    assert summary["first_scores"]["image_nn_accuracy"] > 0.5
    [told] = neighbours_of(summary)
    assert told.startswith("image_nn_accuracy ")
