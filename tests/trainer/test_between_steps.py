"""What workers do between two steps: agree, save, stop, leave a bad loss out, end early. Without Ray."""

import contextlib
import copy
import json
import shutil
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from groups import run_group
from loops import BAD, four_documents, loop_of, nothing, same, take, tensors, worker
from messages import all_of, says

from declutr.common.errors import EncoderError, SaveError
from declutr.pipeline.shards.manifest import data_hash, load_manifest
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.state import RunState
from declutr.trainer.checkpoints.store import store_of
from declutr.trainer.checkpoints.weights import collect
from declutr.trainer.data.stream import Prefetcher
from declutr.trainer.metrics.metrics import METRICS, MetricsWriter, read_metrics
from declutr.trainer.model.language_model import LoadReport
from declutr.trainer.objectives.scores import RowScore, choosing_rows
from declutr.trainer.parallel.communicator import Request
from declutr.trainer.run import run_folder
from declutr.trainer.step.step import NonFiniteLossError
from declutr.trainer.worker import loop


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return four_documents(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(autouse=True)
def data(prepared, tmp_path):
    (tmp_path / "data").symlink_to(prepared)


def test_a_bad_loss_changes_nothing_but_the_count_which_is_exact_over_a_resume(tmp_path, log):
    one, other, first = (worker(tmp_path) for _ in range(3))
    measured = take(one, 1, 6)
    assert [m.skipped for m in measured] == [step in BAD for step in range(1, 7)]
    assert counts(one) == (2, 0)
    assert len([line for line in log if "skipped" in line]) == 2
    for step in sorted(set(range(1, 7)) - BAD):
        assert take(other, step, step) == [measured[step - 1]]
    assert same(tensors(one), tensors(other))
    take(first, 1, 2)
    save(first, 2)
    second = worker(tmp_path)
    assert second.checkpointing.resume() == 2
    assert counts(second) == (1, 1)
    assert [m.loss for m in take(second, 3, 6) if not m.skipped] == [m.loss for m in measured[2:] if not m.skipped]
    assert second.train_step.nonfinite_losses.skipped == 2
    assert same(tensors(second), tensors(one))
    folder = tmp_path / "checkpoints"
    state = checkpoint.find_latest(folder)[1].model_dump()
    later = RunState(**state | {"step": 3, "files": {}, "tasks_skipped": {"image": (2, 1)}})
    checkpoint.save(folder, later, collect(second.train_steps))
    assert checkpoint.find_latest(folder)[1].tasks_skipped == {"image": [2, 1]}


def counts(loop):
    return loop.train_step.nonfinite_losses.skipped, loop.train_step.nonfinite_losses.in_a_row


def save(loop, step):
    with loop.checkpointing.writing(nothing):
        loop.checkpointing.save(step, {})
        loop.checkpointing.saver.wait()


def test_too_many_in_a_row_stop_the_run(tmp_path):
    one = worker(tmp_path, max_skipped_steps=2)
    take(one, 1, 3, bad={1, 2})
    take(one, 4, 5, bad={4, 5})
    with pytest.raises(NonFiniteLossError, match=all_of("step 6", "loss nan", "max_skipped_steps = 2")):
        take(one, 6, 6, bad={6})
    with pytest.raises(NonFiniteLossError, match=all_of("step 2", "loss nan")):
        take(worker(tmp_path, on_nonfinite_loss="stop"), 1, 6)


def on_ranks(comm, folder):
    """A bad loss on one rank's share alone, a notice on the last rank alone, a storage that only rank 0 sees fail."""
    union = comm.all_reduce_or(Request.SAVE if comm.rank == 0 else Request.STOP if comm.rank == 1 else Request(0))
    no_request = comm.all_reduce_or(Request(0))
    one = worker(folder, comm)
    skipped = [m.skipped for m in take(one, 1, 3, comm)]
    one.checkpointing.early_request = Request.EARLY if comm.rank == 0 else Request(0)
    with one.checkpointing.writing(nothing):
        ended = one.checkpointing.after_step(3, {}, stop=comm.rank == comm.size - 1) and one.checkpointing.early
    comm.all_reduce_max(0)
    other = worker(folder, comm)
    resumed = other.checkpointing.resume()
    with other.checkpointing.writing(nothing):
        if (saver := other.checkpointing.saver) is not None:
            saver.close()
            saver._failure = "the disk is full"
        other.checkpointing.after_step(4, {}, stop=False, agreed=Request.SAVE)  # it failed after the agreement
        with pytest.raises(SaveError) as failure:
            other.checkpointing.after_step(5, {}, stop=False)
    count, equal = other.train_step.nonfinite_losses.skipped, same(tensors(other), tensors(one))
    return (union, no_request, skipped, bool(ended), resumed, count, equal), str(failure.value)


@pytest.mark.dist
def test_every_rank_does_the_same(tmp_path):
    results = run_group(2, on_ranks, tmp_path)
    for outcome, message in results:
        assert outcome == (Request.SAVE | Request.STOP, Request(0), [False, True, False], True, 3, 1, True)
        assert message
    says(results[0][-1], "disk is full")


def test_a_notice_ends_after_a_whole_checkpoint(tmp_path):
    one, folder, phases = worker(tmp_path, checkpoint={"every_steps": 100}), tmp_path / "checkpoints", []
    with one.checkpointing.writing(nothing):
        take(one, 1, 1)
        assert not one.checkpointing.after_step(1, {}, stop=False)
        assert checkpoint.steps_in(folder) == []
        take(one, 2, 2)
        saver, wait = one.checkpointing.saver, one.checkpointing.saver.wait
        saver.wait = lambda: (phases.append(one.heartbeat.phase), wait())
        assert one.checkpointing.after_step(2, {}, stop=True)
    assert checkpoint.find_latest(folder)[1].step == 2
    assert phases == ["writing"], "which has its own time limit"


class Reports(list):
    """What one worker reports, in place of the thread that passes it to Ray Train."""

    def report(self, metrics, name=None):
        self.append((metrics.get("step"), name))

    def close(self):
        self.append("closed")


def reporting(run, **settings):
    loop = worker(run, checkpoint=settings)
    loop.checkpointing._reporter = Reports()
    return loop.checkpointing, loop.checkpointing._reporter


def test_a_written_checkpoint_is_reported_once_and_by_every_worker_equally_often(tmp_path):
    checkpointing, reports = reporting(tmp_path, every_steps=2)
    with checkpointing.writing(nothing):
        for step in range(1, 7):
            checkpointing.after_step(step, {}, stop=False)
            checkpointing.saver.wait()
    assert reports == [*((step, f"step-{step:08}") for step in (2, 4, 6)), "closed"]
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("a file, not a folder")
    checkpointing, reports = reporting(tmp_path, storage_retry_seconds=0)
    with checkpointing.writing(nothing), pytest.raises(SaveError, match="checkpoints"):
        checkpointing.after_step(6, {}, stop=False)
    assert reports == [(None, None)]
    without_saver, its_reports = reporting(tmp_path)
    without_saver._finish()
    assert its_reports == [*reports, "closed"]


def test_the_copy_is_of_the_step_and_not_of_what_comes_after(tmp_path):
    one = worker(tmp_path)
    take(one, 1, 1, bad=())
    contents = collect([one.train_step])
    kept = copy.deepcopy(contents)
    take(one, 2, 3, bad=())
    assert all(torch.equal(contents[file][name], kept[file][name]) for file in kept for name in kept[file])
    file, name = "encoder.safetensors", "model.roberta.embeddings.LayerNorm.bias"
    again = collect([one.train_step], memory=contents)[file]
    assert again.keys() == kept[file].keys()
    assert again[name].data_ptr() == contents[file][name].data_ptr()
    assert not torch.equal(again[name], kept[file][name])


def test_random_weights_take_no_step(tmp_path):
    """The driver may have looked at another copy of the encoder than a worker loads."""

    def loaded(new_head=False, **report):
        loop = worker(tmp_path, encoder={"pretrained": "somewhere", "new_mlm_head": new_head})
        loop.train_step.encoder.load_report = LoadReport(**report)
        return loop

    for report, message in (({"encoder": ("bert.a",)}, "bert.a"), ({"head": ("cls.a",)}, "no MLM head")):
        with pytest.raises(EncoderError, match=all_of(message)):
            loaded(**report).train()
    loaded(new_head=True, head=("cls.a",)).refuse_random_weights()
    loaded(unused=("adapter",)).refuse_random_weights()


def test_an_error_of_the_reading_thread_is_raised_in_its_reader():
    def failing():
        yield from (1, 2)
        raise OSError("a shard is gone")

    items = []
    with pytest.raises(OSError, match="shard is gone"):
        items.extend(Prefetcher(failing()))
    assert items == [1, 2]
    assert list(Prefetcher(iter(range(20)))) == list(range(20))


class Numbers:
    """A validator whose rows have these values plus the number of its calls."""

    calls = 0

    def scores(self, _encoder):
        self.calls += 1
        keys = np.arange(40, dtype=np.uint64)
        return {"mrr": RowScore(keys, keys.astype(float) + self.calls), "effective_rank": 3.0}


def validated(run):
    one = worker(run, checkpoint={"every_steps": 100}, validation={"score": "mrr"})
    one.validator = Numbers()
    return one, one.checkpointing.resume()


def test_weights_of_the_start_that_are_validated_again_have_one_line(tmp_path):
    (tmp_path / METRICS).write_text(json.dumps({"kind": "validation", "step": 0, "mrr": 0.5}) + "\n")
    for _ in range(2):
        one, _ = validated(tmp_path)
        with one.recording(0) as records:
            one.validate(0, records)
    (line,) = read_metrics(tmp_path)
    assert line["step"] == 0
    assert line["mrr"] != 0.5
    one.validator = None
    with one.recording(0):
        assert read_metrics(tmp_path) == [], "without validation there are no scores, and these are of another start"


def test_rows_of_the_start_go_with_every_checkpoint_also_after_a_resume(tmp_path, log):
    one, done = validated(tmp_path)
    reporting = np.flatnonzero(~choosing_rows(0, np.arange(40, dtype=np.uint64)))
    assert (done, one.checkpointing.at_start) == (0, True)
    with contextlib.closing(MetricsWriter(tmp_path, 0)) as records, one.checkpointing.writing(nothing):
        one.validate(0, records)
        one.checkpointing.save(2, one.validate(2, records))
        one.checkpointing.saver.wait()
    assert [line.rpartition(": ")[0] for line in log] == [f"validated after step {step} of 6" for step in (0, 2)]
    lines = [line for line in read_metrics(tmp_path) if line["kind"] == "validation"]
    assert [line["step"] for line in lines] == [0, 2]
    assert lines[1]["reported_mrr"] == reporting.mean() + 2 != lines[1]["mrr"]
    two, done = validated(tmp_path)
    assert (done, two.checkpointing.at_start) == (2, False), "the start is not validated again"
    with two.checkpointing.writing(nothing):
        two.checkpointing.save(3, {})
        two.checkpointing.save(4, two.validate(4, None))
        two.checkpointing.saver.wait()
        two.checkpointing.save(5, {})
        two.checkpointing.saver.wait()
    paths = (checkpoint.checkpoint_path(tmp_path / "checkpoints", step) for step in (2, 4, 5))
    rows = [checkpoint.read_state(path).reported for path in paths]
    start = [float(row) + 1 for row in reporting]
    assert [part.start for part in rows] == [start] * 3
    assert [part.rows[0] for part in rows[:2]] == [start[0] + 1, start[0]]
    assert rows[2].rows == [], "step 5 was not validated"


def test_a_run_at_an_address_is_one_run_of_wandb_on_every_host(tmp_path, monkeypatch):
    program = MagicMock()
    monkeypatch.setattr(loop, "wandb_run", program)
    for place in ("s3://bucket/run", str(tmp_path)):
        for host in ("one", "other"):
            monkeypatch.setattr(loop.socket, "gethostname", lambda host=host: host)
            recorded = worker(tmp_path, metrics={"wandb": {"mode": "offline"}})
            recorded.config = recorded.config.model_copy(update={"run": place})
            with recorded.recording(0):
                pass
    facts = [call.args[2] for call in program.call_args_list]
    assert facts[0] == facts[1]
    assert [run.get("host") for run in facts] == [None, None, "one", "other"]


# By step: nothing after 4 is better until 10, nothing after that at all.
MRR = {2: 0.1, 4: 0.3, 6: 0.2, 8: 0.3, 10: 0.9, 12: 0.4, 14: 0.5, 16: 0.6, 18: 0.7}


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
        if done == 0:
            saving.scored(0, {"mrr": 1.0}, rows=np.ones(1))  # of the start, which no step has to beat
        for step in range(done + 1, 19):
            if scores := {"mrr": MRR[step]} if step in MRR else {}:
                records.add("validation", step, scores)
                saving.scored(step, scores)
            if saving.after_step(step, scores, stop=False):
                return step, saving.early
            saving.saver.wait()
            if step == kill_after:
                break
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
        store_of(config.run, run).fetch(expected=expected)
        return loop_of(config, run, one.train_step, tmp_path / "data")

    assert go_on(on("one"), kill_after=7) is None
    assert go_on(on("two")) == (8, True)
    third = on("three")
    assert (third.train(), third.checkpointing.early) == (8, True)
    assert checkpoint.steps_in(third.run / "checkpoints") == [8]
    store_of(third.config.run, third.run).fetch_best("mrr")
    assert checkpoint.steps_in(third.run / "checkpoints") == [4]
