"""Early stopping: the step at which a run ends, whenever and wherever it was killed. Without Ray."""

import contextlib

import pytest
from loops import four_documents, loop_of, worker

from declutr.pipeline.shards.manifest import data_hash, load_manifest
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.store import fetch_run, store_of
from declutr.trainer.metrics.metrics import MetricsWriter
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.setup.cache import run_folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return four_documents(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(autouse=True)
def data(prepared, tmp_path):
    (tmp_path / "data").symlink_to(prepared)


MRR = {2: 0.1, 4: 0.3, 6: 0.2, 8: 0.3, 10: 0.9, 12: 0.4, 14: 0.5, 16: 0.6, 18: 0.7}
"""By step: nothing after 4 is better until 10, nothing after that at all."""


def patient(run, patience=2):
    validation = {"every_steps": 2, "score": "mrr", "patience": patience}
    saving = {"every_steps": 18, "every_seconds": None, "keep_last": 1}
    return worker(run, total_steps=18, export="best", validation=validation, checkpoint=saving)


def go_on(one, kill_after=None):
    """Steps without training, with the scores above: the last step, and whether the run has ended early."""
    saving = one.checkpointing
    done = saving.resume()
    if saving.ended(done):
        return done, True
    with contextlib.closing(MetricsWriter(one.run, done)) as records, saving.writing(records.flush):
        for step in range(done + 1, 19):
            scores = {"mrr": MRR[step]} if step in MRR else {}
            if scores:
                records.scores(step, scores)
                saving.scored(step, scores)
            if saving.after_step(step, scores, stop=False):
                return step, saving.early
            saving.saver.wait()
            if step == kill_after:
                return None
    return None


def test_patience_ends_a_run_at_the_same_step_whenever_it_was_killed(tmp_path):
    for kill_after in (None, 3, 4, 7):
        run = tmp_path / str(kill_after)
        run.mkdir()
        (run / "data").symlink_to(tmp_path / "data")
        if kill_after:
            assert go_on(patient(run), kill_after) is None
        assert go_on(patient(run)) == (8, True)
        assert checkpoint.steps_in(run / "checkpoints") == [4, 8], "the best and the last"
        one = patient(run)
        assert (one.train(), one.checkpointing.early) == (8, True), "it stays ended, before it reads anything"
    assert go_on(patient(run, patience=3)) == (16, True), "a larger patience goes on: 10 is better, three are not"
    assert go_on(patient(run, patience=None)) == (18, False)


def test_patience_ends_a_run_at_an_address_on_whatever_host_it_goes_on(tmp_path):
    def on(host):
        one = patient(tmp_path)
        config = one.config.model_copy(update={"run": f"file://{tmp_path}/there", "cache": str(tmp_path / host)})
        run = run_folder(config.run, config.cache)
        expected = {"config_hash": config.hash(), "data_hash": data_hash(load_manifest(tmp_path / "data"))}
        fetch_run(store_of(config.run, run), expected, Communicator())
        return loop_of(config, run, one.train_step, tmp_path / "data")

    assert go_on(on("one"), kill_after=7) is None
    assert go_on(on("two")) == (8, True)
    third = on("three")
    assert (third.train(), third.checkpointing.early) == (8, True)
    found = [checkpoint.steps_in(third.run / "checkpoints")]
    store_of(third.config.run, third.run).fetch_best("mrr")
    assert [*found, checkpoint.steps_in(third.run / "checkpoints")] == [[8], [4]]
