"""What workers do between two steps: agree, save, stop, leave a bad loss out, end early. Without Ray."""

import contextlib
import copy
import json

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


def test_a_bad_loss_changes_nothing_but_the_count(tmp_path, log):
    one, other = worker(tmp_path), worker(tmp_path)
    measured = take(one, 1, 6)
    assert [m.skipped for m in measured] == [step in BAD for step in range(1, 7)]
    assert (one.train_step.nonfinite_losses.skipped, one.train_step.nonfinite_losses.in_a_row) == (2, 0)
    assert len([line for line in log if "skipped" in line]) == 2
    for step in sorted(set(range(1, 7)) - BAD):
        assert take(other, step, step) == [measured[step - 1]]
    assert same(tensors(one), tensors(other))


def test_count_of_bad_losses_is_exact_over_a_resume(tmp_path):
    one = worker(tmp_path)
    whole = take(one, 1, 6)
    first = worker(tmp_path)
    take(first, 1, 2)
    with first.checkpointing.writing(nothing):
        first.checkpointing.save(2, {})
        first.checkpointing.saver.wait()
    second = worker(tmp_path)
    assert second.checkpointing.resume() == 2
    assert (second.train_step.nonfinite_losses.skipped, second.train_step.nonfinite_losses.in_a_row) == (1, 1)
    again = take(second, 3, 6)
    assert [m.loss for m in again if not m.skipped] == [m.loss for m in whole[2:] if not m.skipped]
    assert second.train_step.nonfinite_losses.skipped == 2
    assert same(tensors(second), tensors(one))


def test_too_many_in_a_row_stop_the_run(tmp_path):
    one = worker(tmp_path, max_skipped_steps=2)
    take(one, 1, 3, bad={1, 2})
    take(one, 4, 5, bad={4, 5})
    with pytest.raises(NonFiniteLossError, match=all_of("step 6", "loss nan", "max_skipped_steps = 2")):
        take(one, 6, 6, bad={6})


def test_stopping_is_the_default(tmp_path):
    one = worker(tmp_path, on_nonfinite_loss="stop")
    with pytest.raises(NonFiniteLossError, match=all_of("step 2", "loss nan")):
        take(one, 1, 6)


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
    words = ""
    with other.checkpointing.writing(nothing):
        if (saver := other.checkpointing.saver) is not None:
            saver.close()
            saver._failure = "the disk is full"
        other.checkpointing.after_step(4, {}, stop=False, agreed=Request.SAVE)  # it failed after the agreement
        try:
            other.checkpointing.after_step(5, {}, stop=False)
        except SaveError as error:
            words = str(error)
    count, equal = other.train_step.nonfinite_losses.skipped, same(tensors(other), tensors(one))
    return (union, no_request, skipped, bool(ended), resumed, count, equal), words


def test_checkpoints_of_a_run_whose_task_skipped_a_step_are_kept(tmp_path):
    one = worker(tmp_path, checkpoint={"every_steps": 1})
    with one.checkpointing.writing(nothing):
        one.checkpointing.save(1, {})
        one.checkpointing.saver.wait()
    folder = tmp_path / "checkpoints"
    _, state = checkpoint.find_latest(folder)
    later = RunState(**state.model_dump() | {"step": 2, "files": {}, "tasks_skipped": {"image": (2, 1)}})
    checkpoint.save(folder, later, collect(one.train_steps))
    assert checkpoint.find_latest(folder)[1].tasks_skipped == {"image": [2, 1]}


@pytest.mark.dist
def test_every_rank_does_the_same(tmp_path):
    results = run_group(2, on_ranks, tmp_path)
    for found, words in results:
        assert found == (Request.SAVE | Request.STOP, Request(0), [False, True, False], True, 3, 1, True)
        assert words
    says(results[0][-1], "disk is full")


def test_a_notice_ends_after_a_whole_checkpoint(tmp_path):
    one = worker(tmp_path, checkpoint={"every_steps": 100})
    folder = tmp_path / "checkpoints"
    phases = []
    with one.checkpointing.writing(nothing):
        take(one, 1, 1)
        assert not one.checkpointing.after_step(1, {}, stop=False)
        assert checkpoint.steps_in(folder) == []
        take(one, 2, 2)
        saver = one.checkpointing.saver
        wait = saver.wait
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


def test_a_written_checkpoint_is_reported_once_and_the_last_before_the_end(tmp_path):
    one = worker(tmp_path, checkpoint={"every_steps": 2})
    one.checkpointing._reporter = reports = Reports()
    with one.checkpointing.writing(nothing):
        for step in range(1, 7):
            one.checkpointing.after_step(step, {}, stop=False)
            one.checkpointing.saver.wait()
    assert reports == [*((step, f"step-{step:08}") for step in (2, 4, 6)), "closed"]


def test_every_worker_reports_equally_often_also_if_the_last_checkpoint_cannot_be_written(tmp_path):
    (tmp_path / "checkpoints").write_text("a file, not a folder")
    one = worker(tmp_path, checkpoint={"storage_retry_seconds": 0})
    one.checkpointing._reporter = reports = Reports()
    with one.checkpointing.writing(nothing), pytest.raises(SaveError, match="checkpoints"):
        one.checkpointing.after_step(6, {}, stop=False)
    assert reports == [(None, None)]
    other = worker(tmp_path)  # as a worker without a saver
    other.checkpointing._reporter = others = Reports()
    other.checkpointing._finish()
    assert others == [*reports, "closed"]


def test_the_copy_is_of_the_step_and_not_of_what_comes_after(tmp_path):
    """While the writer has not begun, training goes on: what is written are the weights of the step that was saved."""
    one = worker(tmp_path)
    take(one, 1, 1, bad=())
    contents = collect([one.train_step])
    kept = copy.deepcopy(contents)
    take(one, 2, 3, bad=())
    assert all(torch.equal(contents[file][name], kept[file][name]) for file in kept for name in kept[file])
    again = collect([one.train_step], memory=contents)
    assert again["encoder.safetensors"].keys() == kept["encoder.safetensors"].keys()
    name = "model.roberta.embeddings.LayerNorm.bias"
    assert again["encoder.safetensors"][name].data_ptr() == contents["encoder.safetensors"][name].data_ptr()
    assert not torch.equal(again["encoder.safetensors"][name], kept["encoder.safetensors"][name])


@pytest.mark.parametrize(
    ("load_report", "encoder", "refused"),
    [
        (LoadReport(encoder=("bert.a",)), {}, "bert.a"),
        (LoadReport(head=("cls.a",)), {}, "no MLM head"),
        (LoadReport(head=("cls.a",)), {"new_mlm_head": True}, None),
        (LoadReport(unused=("adapter",)), {}, None),
    ],
)
def test_random_weights_take_no_step(tmp_path, load_report, encoder, refused):
    """The driver may have looked at another copy of the encoder than a worker loads."""
    one = worker(tmp_path, encoder={"pretrained": "somewhere", **encoder})
    one.train_step.encoder.load_report = load_report
    if refused is None:
        one.refuse_random_weights()
        return
    with pytest.raises(EncoderError, match=all_of(refused)):
        one.train()


def test_an_error_of_the_reading_thread_is_raised_in_its_reader():
    """After the items that were read before it; without an error, all items arrive."""

    def items():
        yield from (1, 2)
        raise OSError("a shard is gone")

    found = []
    with pytest.raises(OSError, match="shard is gone"):
        found.extend(Prefetcher(items()))
    assert found == [1, 2]
    assert list(Prefetcher(iter(range(20)))) == list(range(20))


class Numbers:
    """A validator whose rows have these values plus the number of its calls."""

    def __init__(self):
        self.calls = 0

    def scores(self, encoder):
        del encoder
        self.calls += 1
        keys = np.arange(40, dtype=np.uint64)
        return {"mrr": RowScore(keys, keys.astype(float) + self.calls), "effective_rank": 3.0}


def validated(run):
    """A loop that can validate, at the step from which it goes on."""
    one = worker(run, checkpoint={"every_steps": 100}, validation={"score": "mrr"})
    one.validator = Numbers()
    return one, one.checkpointing.resume()


def test_weights_of_the_start_that_are_validated_again_have_one_line(tmp_path):
    (tmp_path / METRICS).write_text(json.dumps({"kind": "validation", "step": 0, "mrr": 0.5}) + "\n")
    for _ in range(2):
        one, _ = validated(tmp_path)
        with one.recording(0) as records:
            one.validate(0, records)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [0]
    assert lines[0]["mrr"] != 0.5
    one.validator = None
    with one.recording(0):
        assert read_metrics(tmp_path) == [], "without validation there are no scores, and these are of another start"


def test_rows_of_the_start_go_with_every_checkpoint_also_after_a_resume(tmp_path, log):
    one, done = validated(tmp_path)
    reporting = np.flatnonzero(~choosing_rows(0, np.arange(40, dtype=np.uint64)))
    assert (done, one.checkpointing.at_start) == (0, True)
    with contextlib.closing(MetricsWriter(tmp_path, 0)) as records, one.checkpointing.writing(nothing):
        one.validate(0, records)
        scores = one.validate(2, records)
        one.checkpointing.save(2, scores)
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
    folder = tmp_path / "checkpoints"
    start = [float(row) + 1 for row in reporting]
    found = [checkpoint.read_state(checkpoint.checkpoint_path(folder, step)).reported for step in (2, 4)]
    assert [one.start for one in found] == [start, start]
    assert [one.rows[0] for one in found] == [start[0] + 1, start[0]]
    newest = checkpoint.read_state(checkpoint.checkpoint_path(folder, 5)).reported
    assert (newest.start, newest.rows) == (start, []), "step 5 was not validated"


def test_a_run_at_an_address_is_one_run_of_wandb_on_every_host(tmp_path, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def program(_config, _folder, facts, _settings):
        seen.append(facts)
        yield lambda _line: None

    monkeypatch.setattr(loop, "wandb_run", program)
    for place in ("s3://bucket/run", str(tmp_path)):
        for host in ("one", "other"):
            monkeypatch.setattr(loop.socket, "gethostname", lambda host=host: host)
            one = worker(tmp_path, metrics={"wandb": {"mode": "offline"}})
            one.config = one.config.model_copy(update={"run": place})
            with one.recording(0):
                pass
    assert seen[0] == seen[1]
    assert [facts.get("host") for facts in seen] == [None, None, "one", "other"]


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
        if done == 0:
            saving.scored(0, {"mrr": 1.0}, rows=np.ones(1))  # of the start, which no step has to beat
        for step in range(done + 1, 19):
            scores = {"mrr": MRR[step]} if step in MRR else {}
            if scores:
                records.add("validation", step, scores)
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
        store_of(config.run, run).fetch(expected=expected)
        return loop_of(config, run, one.train_step, tmp_path / "data")

    assert go_on(on("one"), kill_after=7) is None
    assert go_on(on("two")) == (8, True)
    third = on("three")
    assert (third.train(), third.checkpointing.early) == (8, True)
    found = [checkpoint.steps_in(third.run / "checkpoints")]
    store_of(third.config.run, third.run).fetch_best("mrr")
    assert [*found, checkpoint.steps_in(third.run / "checkpoints")] == [[8], [4]]
