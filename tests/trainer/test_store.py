"""What lies at an address is the run: hosts come and go, copies are stale, pushes break off."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tinyruns as runs
import torch
from messages import all_of, says
from prepared import Row, write_prepared
from processes import until
from safetensors.torch import load_file
from tinyruns import state_of

from declutr.common.errors import RemoteError, ShardError
from declutr.common.storage import read_json, write_json
from declutr.common.stores.folder import Folder
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.saver import Saver
from declutr.trainer.checkpoints.state import CheckpointConfig
from declutr.trainer.checkpoints.store import RunStore
from declutr.trainer.data import chunks
from declutr.trainer.data.chunks import rank_plan, read_chunk
from declutr.trainer.data.plan import Plan
from declutr.trainer.driver.continuation import RUN_FILES, choose_device
from declutr.trainer.metrics.metrics import METRICS
from declutr.trainer.run import DEVICE, data_folder, run_folder
from declutr.trainer.scaling import ScalingConfig


def host(tmp_path, name, address=None):
    return RunStore(Folder(address or f"file://{tmp_path}/there", retry_seconds=0.0), tmp_path / name / "run")


def make(store, step, value=None, **scores):
    contents = {"encoder.safetensors": {"weight": torch.full((8,), float(step if value is None else value))}}
    checkpoint.save(store.folder / "checkpoints", state_of(step, **scores), contents)
    store.folder.joinpath(METRICS).write_text(f'{{"step": {step}}}\n')


def save(store, step, score=None, **config):
    make(store, step, **({} if score is None else {"mrr": score}))
    store.save(CheckpointConfig(**config), "mrr", step)


def local(store):
    return checkpoint.steps_in(store.folder / "checkpoints")


def weight(store, step):
    path = checkpoint.checkpoint_path(store.folder / "checkpoints", step)
    return float(load_file(path / "encoder.safetensors")["weight"][0])


def there(store):
    return checkpoint.steps_among((store.remote / "checkpoints").names())


def place(store, step):
    return store.remote / f"checkpoints/step-{step:08d}"


def test_another_host_goes_on_where_the_first_one_was(tmp_path):
    first, other = host(tmp_path, "one"), host(tmp_path, "other")
    assert other.fetch() is None
    save(first, 1, 0.1, keep_last=2)
    assert other.fetch(expected={"config_hash": "another"}) is None
    assert local(other) == []
    for step, score in enumerate([0.1, 0.9, 0.3, 0.2, 0.5], start=1):
        save(first, step, score, keep_last=2)
    assert there(first) == [2, 4, 5]
    path, state = other.fetch()
    assert (path.name, state.step, local(other)) == ("step-00000005", 5, [5])
    assert (other.folder / METRICS).read_text() == '{"step": 5}\n'
    save(other, 6, 0.4, keep_last=2)  # which has never had 2 on its disk
    assert there(first) == [2, 5, 6]
    first.fetch_best("mrr")
    assert local(first) == [2]


def test_checkpoints_of_an_outage_that_are_kept_are_sent_with_the_next_one(tmp_path):
    """A newer copy replaced them in the saver's memory while the store did not answer."""
    first, other = host(tmp_path, "one"), host(tmp_path, "other")
    save(first, 1, 0.1, keep_last=1)
    for step, score in ((2, 0.2), (4, 0.9), (5, 0.3)):
        make(first, step, mrr=score)
    save(first, 6, 0.4, keep_last=1, keep_every_steps=2)
    assert there(first) == [2, 4, 6]
    other.fetch_best("mrr")
    assert local(other) == [4]


def test_a_stale_copy_gives_way_also_for_all_ranks_of_a_host(tmp_path):
    """The first host saved steps that never arrived; another took its place and took them again, otherwise."""
    first, other = host(tmp_path, "one"), host(tmp_path, "other")
    save(first, 1)
    make(first, 2, value=20)
    make(first, 3, value=30)
    other.fetch()
    save(other, 2)
    assert first.fetch()[1].step == 2
    assert (local(first), weight(first, 2)) == ([2], 2.0)
    make(first, 3, value=30)
    save(other, 3)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(first.fetch_step, [3] * 4))
    assert (local(first), weight(first, 3)) == ([3], 3.0)


def test_damaged_checkpoint_in_the_store_is_passed_over_and_replaced(tmp_path, log):
    first, other = host(tmp_path, "one"), host(tmp_path, "other")
    for step in (1, 2, 3, 4):
        save(first, step, keep_last=4)
    place(first, 4).delete(".files.json")  # killed on its way
    place(first, 3).put("encoder.safetensors", b"altered")
    assert other.fetch()[1].step == 2
    assert [line for line in log if "skipping" in line and "step-00000003" in line]
    assert local(other) == [2]
    save(other, 3, keep_last=2)
    assert there(first) == [2, 3, 4]  # 4 has yet to be come by
    assert first.fetch()[1].step == 3
    save(other, 4, keep_last=2)
    assert (first.fetch()[1].step, there(first)) == (4, [3, 4])
    place(first, 3).delete(".files.json")
    save(other, 5, keep_last=2)
    assert there(first) == [4, 5], "files of a killed writer are cleared away"


def test_checkpoints_whose_list_is_damaged_are_sent_anew(tmp_path):
    first, other = host(tmp_path, "one"), host(tmp_path, "other")
    save(first, 1)
    for _ in range(2):  # the run reaches the second step again
        for step in there(first):
            place(first, step).put(".files.json", b"[")
        save(first, 2)
        assert other.fetch()[1].step == 2
    other.fetch_step(1)  # it is kept, and was still on the first host


def test_an_outage_is_waited_out_while_the_training_goes_on(tmp_path, log):
    """A place whose folder is a file at first, so that everything in it fails."""
    gate = tmp_path / "gate"
    gate.write_text("in the way")
    first, config, order = host(tmp_path, "one", f"file://{gate}/run"), CheckpointConfig(keep_last=1), []

    def before():
        order.append("numbers")
        first.folder.mkdir(parents=True, exist_ok=True)
        (first.folder / METRICS).write_text("{}\n")

    def after(step):
        order.append(step)
        first.save(config, "mrr", step)

    saver = Saver(first.folder / "checkpoints", config, "mrr", before, after=after)
    saver.submit(state_of(1), {"encoder.safetensors": {"weight": torch.ones(2)}})
    until(lambda: order.count(1) >= 2)
    assert local(first) == [1]  # on this host's disk it is
    assert order[:3] == ["numbers", 1, 1]  # and is not written again
    says(log[0], "step 1", "sent", "Training continues")
    gate.unlink()
    saver.wait()
    saver.close()
    assert place(first, 1).is_whole()
    assert order.count("numbers") == 1
    assert first.remote.read(METRICS) == b"{}\n"
    says(log[-1], "step 1", "written")
    with pytest.raises(RemoteError):
        host(tmp_path, "one", "nosuch://x/y").fetch()


def test_shards_are_fetched_by_whoever_reads_them(tmp_path):
    text = " ".join(f"word{number}" for number in range(120))
    write_prepared(tmp_path / "data", [[Row(f"{text} {number}") for number in range(6)]])
    address = f"file://{tmp_path}/there"
    Folder(address).send(tmp_path / "data")
    folder = data_folder(address, str(tmp_path / "cache"))
    assert folder.parent == tmp_path / "cache"
    shards = ShardSet(folder, "train")
    part = rank_plan(Plan(0, shards.num_documents, 2), shards, 0, 1, 0, 3, (address,))
    shutil.rmtree(tmp_path / "cache")  # another host
    assert len(read_chunk({"id": np.array([0])}, part, 0)) == 6
    assert folder.is_dir()

    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "data" / "note").write_text("not what the run began with")
    Folder(address).send(tmp_path / "data")
    chunks._shards.clear()  # another process
    with pytest.raises(ShardError, match="other shards"):
        read_chunk({"id": np.array([0])}, part, 0)


def test_a_file_that_is_gone_here_goes_there_and_the_other_way_round(tmp_path):
    """A folder that was copied as a whole is no run."""
    first, other = host(tmp_path, "one"), host(tmp_path, "other")
    make(first, 1)
    (first.folder / "summary.json").write_text("{}")
    first.send("summary.json", "failures.log")
    other.fetch(["summary.json"])
    assert (other.folder / "summary.json").read_text() == "{}"
    (first.folder / "summary.json").unlink()
    first.send("summary.json")
    other.fetch(["summary.json"])
    assert not (other.folder / "summary.json").exists()
    first.remote.send(first.folder)
    with pytest.raises(RemoteError, match=all_of("as a whole", "another address")):
        first.fetch()
    assert local(first) == [1]


def test_precision_that_a_worker_on_another_host_records_outlives_the_files_of_the_driver(tmp_path):
    driver, first_worker, later = (host(tmp_path, name) for name in ("driver", "worker", "later"))
    driver.folder.mkdir(parents=True)
    choose_device(ScalingConfig(), driver.folder, driver, {"CPU": 8.0})
    first_worker.fetch([DEVICE])
    record = {"device": "cpu", "precision": "bf16"}
    write_json(first_worker.folder / DEVICE, record)
    first_worker.send(DEVICE)
    driver.send(*RUN_FILES)
    later.fetch([*RUN_FILES, DEVICE])
    assert read_json(later.folder / DEVICE) == record


def test_folders_stay_what_they_are(tmp_path):
    cache = str(tmp_path / "cache")
    assert data_folder(str(tmp_path / "data"), cache) == tmp_path / "data"
    assert run_folder(str(tmp_path / "run"), cache) == tmp_path / "run"
    assert run_folder("s3://bucket/runs/one", cache).parent == tmp_path / "cache"
    assert run_folder("s3://bucket/runs/one", cache) != run_folder("s3://bucket/runs/two", cache)
    local, remote = (runs.least_config(run=run) for run in ("run", "s3://bucket/runs/one"))
    assert remote.hash() == local.hash()
