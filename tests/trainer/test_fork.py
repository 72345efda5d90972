"""Forks and changed shards of a run with an auxiliary task, found before any worker starts. No Ray."""

import json
import shutil

import pytest
from madeup import config_of, shards
from mediafiles import png
from mediashards import prepare_media
from messages import all_of, says

from declutr.common.config import ConfigError
from declutr.pipeline.shards.manifest import load_manifest
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.state import RunState, data_hashes, joint_hash
from declutr.trainer.checkpoints.weights import collect
from declutr.trainer.driver.checks import problems
from declutr.trainer.driver.fork import fork
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.setup.build import build_encoder, load_tokenizer
from declutr.trainer.setup.geometry import RESUME_SETTINGS
from declutr.trainer.setup.tasks import build_task, build_train_steps
from declutr.trainer.step.microbatch import Microbatch

STEP = 2


def pictures(folder, first):
    folder.mkdir()
    files = {f"{'ab'[n % 2]}/{n}.png": png(n, (20, 18)) for n in range(first, first + 12)}
    return prepare_media(folder, {"kind": "images", "shortest_edge": 18}, files)[0]


def config(root, **frontend):
    frontend = {"image_size": 16, "patch_size": [8, 8]} | frontend
    image = {"data": str(root / "images/out"), "objective": {"kind": "supcon"}, "batch_documents": 4}
    return config_of(root / "data", root / "run", auxiliary_tasks={"image": image | {"frontend": frontend}})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder with shards of texts and images, and a run with a checkpoint of random weights."""
    root = tmp_path_factory.mktemp("made")
    shards(root / "data")
    pictures(root / "images", 0)
    settings = config(root)
    manifests = {"": load_manifest(root / "data"), "image": load_manifest(root / "images/out")}
    encoder = build_encoder(settings, load_tokenizer(root / "data")[0])
    tasks = [build_task(settings, name, encoder, manifests[name], Communicator(), Microbatch()) for name in manifests]
    train_steps = build_train_steps(settings, tasks, 6)
    contents = collect(train_steps)
    hashes = data_hashes(manifests)
    state = RunState(
        step=STEP,
        documents=8 * STEP,
        world_size=1,
        config_hash=settings.hash(),
        data_hash=joint_hash(hashes),
        task_hashes=hashes,
        scores={},
        files={},
    )
    checkpoint.save(root / "run/checkpoints", state, contents)
    return root


def test_a_fork_keeps_the_frontends_of_its_tasks(made, tmp_path):
    with pytest.raises(ConfigError) as error:
        fork(config(made, patch_size=[4, 4]), str(tmp_path / "new"))
    assert [line for line in error.value.problems if line.startswith("auxiliary_tasks.image: ") and "has shape" in line]
    assert not (tmp_path / "new").exists()
    forked = fork(config(made), str(tmp_path / "new"))
    _, state = checkpoint.find_latest(tmp_path / "new/checkpoints")
    assert (state.step, state.config_hash, sorted(state.task_hashes)) == (STEP, forked.hash(), ["", "image"])


def test_a_task_that_is_new_starts_with_new_weights(made, tmp_path):
    settings = config(made, patch_size=[4, 4])
    settings = settings.model_copy(update={"auxiliary_tasks": {"other": settings.auxiliary_tasks["image"]}})
    fork(settings, str(tmp_path / "new"))
    assert not list((tmp_path / "new").rglob("image.*"))


def test_replaced_shards_are_named_by_their_task(made, tmp_path):
    root = shutil.copytree(made, tmp_path / "copy")
    shutil.rmtree(root / "images")
    pictures(root / "images", 50)
    (line,) = problems(config(root))
    says(line, "other shards", f"auxiliary_tasks.image.data = {root}/images/out")


def test_a_fork_with_moments_of_the_other_kind_is_refused(made, tmp_path):
    (made / "run" / RESUME_SETTINGS).write_text(json.dumps(config(made).resume_settings()))
    other = config(made).model_copy(update={"optim": config(made).optim.model_copy(update={"bias_correction": False})})
    with pytest.raises(ConfigError, match=all_of("optim.bias_correction = False", "had True")):
        fork(other, str(tmp_path / "new"))
