"""Problems of a run's folder that are found before any worker starts. No Ray."""

import shutil

import pytest
from madeup import config_of, shards
from mediafiles import png
from mediashards import prepare_media
from messages import says
from states import state_of

from declutr.pipeline.shards.manifest import load_manifest
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.state import data_hashes, joint_hash
from declutr.trainer.driver.checks import problems


def pictures(folder, first):
    folder.mkdir()
    files = {f"{'ab'[n % 2]}/{n}.png": png(n, (20, 18)) for n in range(first, first + 12)}
    return prepare_media(folder, {"kind": "images", "shortest_edge": 18}, files)[0]


@pytest.fixture
def config(tmp_path):
    """A run with a task of images and a checkpoint after step 2."""
    shards(tmp_path / "data")
    pictures(tmp_path / "images", 0)
    frontend = {"image_size": 16, "patch_size": [8, 8]}
    image = {"data": str(tmp_path / "images/out"), "objective": {"kind": "supcon"}, "batch_documents": 4}
    config = config_of(tmp_path / "data", tmp_path / "run", auxiliary_tasks={"image": image | {"frontend": frontend}})
    hashes = data_hashes({"": load_manifest(tmp_path / "data"), "image": load_manifest(tmp_path / "images/out")})
    identity = {"config_hash": config.hash(), "data_hash": joint_hash(hashes), "task_hashes": hashes}
    state = state_of(2).model_copy(update=identity)
    checkpoint.save(tmp_path / "run/checkpoints", state, {"encoder.safetensors": {}})
    return config


def test_replaced_shards_are_named_by_their_task(config, tmp_path):
    assert problems(config) == []
    shutil.rmtree(tmp_path / "images")
    pictures(tmp_path / "images", 50)
    (line,) = problems(config)
    says(line, "other shards", f"auxiliary_tasks.image.data = {tmp_path}/images/out")


def test_a_fork_of_an_earlier_version_is_not_continued(config, tmp_path):
    (tmp_path / "run" / "fork.json").write_text('{"from": "/runs/first", "step": 2}')
    (line,) = problems(config)
    says(line, config.run, "fork.json", "train --fork", "encoder.pretrained=RUN/export")
