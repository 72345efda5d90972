"""`declutr why` against what the workers of a run read; `declutr inspect RUN` and its checkpoints."""

import itertools
import json
import os
import random
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import tinyruns as runs
import torch
from broken import flip_a_bit
from folders import write
from messages import all_of, says
from preparing import make_pair, prepare_media, prepare_rows
from textruns import AUDIO, IMAGE, IMAGES, PAIRS, SOUNDS, clips, pictures

from declutr.cli.main import main
from declutr.common.config import config_yaml
from declutr.common.errors import UsageError
from declutr.inspection.describe import CheckpointRow, _table
from declutr.inspection.order import read_order
from declutr.inspection.views import StepReader
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.build import build_parts
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.state import EXPORT
from declutr.trainer.config import TrainConfig
from declutr.trainer.data.chunks import rank_plan
from declutr.trainer.data.packedbatch import DIGEST
from declutr.trainer.data.stream import batches
from declutr.trainer.metrics.metrics import METRICS, find_step
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.declutr.objective import Declutr
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.run import RunPlan, run_folder

STEPS, WORKERS = 9, 2
TEXTS = {"max_tokens": 12}
METHODS = {
    "declutr": ("documents", {"kind": "declutr"}),
    "declutr unmasked": ("documents", {"kind": "declutr", "contrast_unmasked_anchors": True}),
    "mlm": ("documents", {"kind": "declutr", "terms": "mlm"}),
    "simcse": ("sentences", {"kind": "simcse", "mlm_loss_weight": 0.1, **TEXTS}),
    "supervised simcse": ("pairs", {"kind": "simcse", "supervised": True, **TEXTS}),
    "scd": ("sentences", {"kind": "scd", "projector": [8], "dropout_rates": [0.05, 0.2], **TEXTS}),
    "scl": ("pairs", {"kind": "scl", **TEXTS}),
}
MIXED = AUDIO | {"objective": {"kind": "supcon", "mixup": 0.5, "masks": {"time_mask": 4, "freq_mask": 6}}}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Folders of shards of each kind, all texts with one tokenizer."""
    folder = tmp_path_factory.mktemp("why")
    rng = random.Random(0)

    def text(least, most):
        return " ".join(rng.choices("abcdefghij", k=rng.randint(least, most)))

    documents = [{"text": f"{text(90, 200)} {number}"} for number in range(50)]
    sentences = [{"text": f"{text(3, 20)} {number}"} for number in range(70)]
    premises = [f"{text(3, 20)} {number}" for number in range(40)]
    pairs = [make_pair(premise, text(2, 9), label % 3) for premise in premises for label in range(4)]
    return {
        "documents": prepare_rows(folder / "documents", "documents", documents, geometry=runs.GEOMETRY)[0],
        "sentences": prepare_rows(folder / "sentences", "sentences", sentences)[0],
        "pairs": prepare_rows(folder / "pairs", PAIRS, pairs)[0],
        "images": prepare_media(folder / "images", IMAGES, pictures())[0],
        "sounds": prepare_media(folder / "sounds", SOUNDS, clips())[0],
    }


def why(capsys, run, *words, status=0):
    """What `declutr why` shows of a run, or its error."""
    capsys.readouterr()
    assert main(["why", str(run), *words]) == status
    answer = capsys.readouterr()
    return answer.err if status else answer.out


def spans_of(batch):
    """Everything that a batch holds of each span: tokens or patches, dropout key, tokens to predict."""
    found, ends = [], batch.spans.lengths.cumsum(0).tolist()
    for number, end in enumerate(ends):
        start = end - int(batch.spans.lengths[number])
        key = int(batch.spans.keys[number])
        if not hasattr(batch.spans, "input_ids"):
            found.append((batch.spans.values[start:end].numpy().tobytes(), key))
            continue
        chosen = (batch.spans.selected >= start) & (batch.spans.selected < end)
        rates = () if batch.spans.rates is None else tuple(batch.spans.rates[number].tolist())
        places = tuple((batch.spans.selected[chosen] - start).tolist())
        ids = tuple(batch.spans.input_ids[start:end].tolist())
        found.append((ids, key, places, tuple(batch.spans.labels[chosen].tolist()), rates))
    return found


def read_by_workers(config):
    """What two workers read in each step, by task, through the stream of a run; all chunks are read in this process."""
    run = RunPlan.of(config)
    collators, found = build_parts(run, Communicator(), torch.device("cpu")).collators, {}
    for name, plan in run.orders.items():
        split, collator, parts = run.training_shards[name], collators[name], []
        for rank in range(WORKERS):
            mine = rank_plan(plan, split, rank, WORKERS, 0, STEPS, fetch=getattr(collator, "fetch", None))
            assert mine.num_chunks == 1
            parts.append(list(batches(mine, collator, torch.device("cpu"))))
        found[name] = list(zip(*parts, strict=True))
    return found


def run_of(shards, folder, method, **changes):
    """The folder of a run of a method with two auxiliary tasks, and what its workers read."""
    content, objective = METHODS[method]
    tasks = {"image": {"data": str(shards["images"]), **IMAGE}, "audio": {"data": str(shards["sounds"]), **MIXED}}
    settings = {"objective": objective, "auxiliary_tasks": tasks, "task_schedule": "alternating"}
    values = runs.train_values(shards[content], folder, steps=STEPS, **settings) | changes
    if content != "documents":
        del values["spans"]
    config = TrainConfig.model_validate(values)
    read = read_by_workers(config)
    folder.mkdir()
    (folder / "config.yaml").write_text(config_yaml(config))
    with (folder / METRICS).open("w") as stream:
        for step in range(1, STEPS + 1):
            digests = {
                f"{name}_batch_digest" if name else "batch_digest": sum(one.digest for one in steps[step - 1]) % DIGEST
                for name, steps in read.items()
            }
            stream.write(json.dumps({"kind": "step", "step": step, "time": 0.0, **digests}) + "\n")
    return config, read


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_why_shows_every_span_that_the_workers_read(shards, tmp_path, capsys, method):
    changes = {"scaling": {"num_workers": 2, "elastic_determinism": True}} if method == "declutr unmasked" else {}
    _, read = run_of(shards, tmp_path / "run", method, **changes)
    order = read_order(tmp_path / "run")
    for name, task in order.tasks.items():
        reader = StepReader(task, order.folder)
        for step in range(1, STEPS + 1) if method == "declutr" else (1, 6, 8):  # of two epochs
            rows = list(reader.rows(step))
            expected = [span for part in read[name][step - 1] for span in spans_of(part)]
            assert sorted(span for row in rows for span in spans_of(row.batch)) == sorted(expected), (name, step)
            assert sum(row.batch.spans.digest() for row in rows) % DIGEST == order.logged_digest(name, step)
            assert all(len(row.roles) in (0, row.batch.spans.num_spans) for row in rows)
    shown = why(capsys, tmp_path / "run", "--step", "4")
    assert shown.count("as the run logged it") == 3
    assert shown.count("\nposition ") == 8 + 6 + 5
    assert ("to predict: " in shown) == (method in ("declutr", "declutr unmasked", "mlm", "simcse"))
    assert ("positive [" in shown) == method.startswith("declutr")
    assert "mel bands [" in shown
    assert re.search(r"\n  clip 0: .*; 0\.\d{3} of it mixed with 0\.\d{3} of [0-9a-f]{32}, .*\.wav at 0", shown)
    assert "pixels [" in shown


@pytest.fixture(scope="module")
def run(shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    return folder, *run_of(shards, folder, "declutr", data_fraction=0.8)


def test_document_lists_every_step_that_read_it(run, capsys):
    folder, config, read = run
    order = read_order(folder)
    for name in order.tasks:
        split = ShardSet(Path(config.tasks()[name].data), "train", part=config.tasks()[name].part)
        keys = split.take(np.arange(split.num_documents))["id"].to_pylist()
        dropout_key = {span[1] for part in read[name][6] for span in spans_of(part)}
        reader = StepReader(order.tasks[name], folder)
        document = next(row for row in reader.rows(7) if {span[1] for span in spans_of(row.batch)} <= dropout_key)
        assert keys[document.number].hex() == document.id
        steps = [step for step in range(1, STEPS + 1) for row in reader.rows(step) if row.number == document.number]
        shown = why(capsys, folder, "--document", document.id)
        assert re.findall(r"step (\d+), position", shown) == list(map(str, steps))
        assert f"{len(steps)} of the 9 steps taken read it, {len(steps)} of all 9" in shown
        assert ("not listed: steps that mix it into another clip (objective.mixup = 0.5)" in shown) == (name == "audio")
        assert why(capsys, folder, "--document", document.id, "--step", "7").count("position ") == 1
        for unread in [step for step in range(1, STEPS + 1) if step not in steps][:1]:
            error = why(capsys, folder, "--document", document.id, f"--step={unread}", status=1)
            assert f"step {unread} does not read it" in error


def test_document_outside_the_share_or_held_out_is_read_by_no_step(run, capsys):
    folder, config, _ = run
    splits = [ShardSet(Path(config.data), "train", part=part) for part in (None, config.main.part)]
    every, read = (split.take(np.arange(split.num_documents))["id"].to_pylist() for split in splits)
    says(why(capsys, folder, "--document", next(one for one in every if one not in read).hex()), "outside the share")
    held_out = ShardSet(Path(config.data), "held-out").take(np.array([0]))["id"][0].as_py().hex()
    shown = why(capsys, folder, "--document", held_out)
    assert [part for part in ("held out", "no step reads it") if part not in shown] == []


def test_why_of_other_shards_names_both_digests_and_the_setting(run, shards, capsys, tmp_path):
    folder, _, _ = run
    other = shutil.copytree(shards["documents"], tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text())
    next(shard for shard in manifest["shards"] if shard["split"] == "held-out")["split"] = "train"
    write(other / "manifest.json", manifest)
    assert main(["why", str(folder), "--step", "2", f"data={other}"]) == 1
    assert "add data=FOLDER" in capsys.readouterr().out
    row = ShardSet(shards["documents"], "train").take(np.array([0])).to_pylist()[0]
    document, offsets = row["id"].hex(), ("9" * 19, "9" * 5000, "²")  # that no file has
    for words, message in (
        (["--step", "2", f"data={tmp_path / 'none'}"], f"data = {tmp_path / 'none'}"),
        (["--step", "2", "data=s3://bucket/x"], "declutr copy s3://bucket/x FOLDER"),
        (["--step", "2", "batch_documents=1000000000000"], "batch_documents = 1000000000000: "),
        (["--document", document, f"steps={10**18}"], "at most 10,000,000 are listed"),
        *[([f"--step={step}"], f"--step {step}: the run has the steps 1 to 9") for step in ("0", "10", "-3")],
        (["--document", "nowhere.txt"], "no document matches 'nowhere.txt'"),
        *[(["--document", f"{row['source']}:{offset}"], "no document matches") for offset in offsets],
    ):
        assert message in why(capsys, folder, *words, status=1)


def test_why_of_a_file_shows_a_run_that_has_not_started(run, capsys, tmp_path):
    folder, config, _ = run
    values = config.model_dump(mode="json") | {"run": str(tmp_path / "new")}
    file = runs.write_config(tmp_path / "run.yaml", train=values)
    new = why(capsys, file, "--step", "4")
    assert new.count("not taken yet, the newest step in the metrics is no step") == 3
    started = why(capsys, folder, "--step", "4")
    lines = [[line for line in text.splitlines() if "digest" not in line] for text in (new, started)]
    assert lines[0] == lines[1]
    assert why(capsys, file, "--step", "4", "seed=5") != new
    cache, address = tmp_path / "cache", "s3://bucket/run"
    shutil.copytree(folder, run_folder(address, str(cache)))
    values |= {"run": address, "cache": str(cache)}
    far = why(capsys, runs.write_config(tmp_path / "far.yaml", train=values), "--step", "4")
    assert far == started, "this host's copy of the run is read"


def test_a_step_is_found_between_other_and_damaged_lines(tmp_path):
    path = tmp_path / METRICS
    padding = "x" * 50
    with path.open("w") as stream:
        for step in range(1, 2_001):
            if step % 100 == 1:
                stream.write(json.dumps({"kind": "start", "step": step, "workers": 2}) + "\n")
            stream.write("damaged " + padding + "\n" if step == 777 else "")
            if step != 1_234:
                stream.write(json.dumps({"kind": "step", "step": step, "loss": step / 2, "mfu": None}) + "\n")
        stream.write('{"kind": "step", "step": 2001, "loss": 1')
    for step in (1, 2, 776, 777, 1001, 2_000):
        assert find_step(path, step)["loss"] == step / 2
    for step in (0, 1_234, 2_001, 10**9):
        assert find_step(path, step) is None
    assert find_step(tmp_path / "none", 1) is None


ALL_STEPS, TAKEN = 12, 9


@pytest.fixture
def short_run(shards, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(config_yaml(runs.train_config(shards["documents"], folder, steps=ALL_STEPS)))
    lines = [{"kind": "step", "step": step, "time": 0.0, "batch_digest": 1} for step in range(1, TAKEN + 1)]
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_step_whose_line_is_damaged_was_taken_and_a_fork_of_an_earlier_version_is_refused(short_run, capsys):
    lines = (short_run / METRICS).read_text().splitlines()
    lines[5] = lines[5][:20]
    (short_run / METRICS).write_text("\n".join(lines) + "\n")
    shown = why(capsys, short_run, "--step", "6")
    says(shown, "the step was taken", "no whole line")
    assert "not taken yet" not in shown


def test_shards_prepared_for_shorter_spans_are_refused_with_the_setting(shards, short_run, tmp_path, capsys):
    again = shutil.copytree(shards["documents"], tmp_path / "again")
    manifest = json.loads((again / "manifest.json").read_text())
    write(again / "manifest.json", manifest | {"geometry": manifest["geometry"] | {"max_tokens": 8}})
    for view in (["--step", "1"], ["--document", "0" * 32]):
        error = why(capsys, short_run, *view, f"data={again}", status=1)
        says(error, "spans.max_tokens = 16", "at most 8", "add data=FOLDER")


def test_a_share_that_fills_no_batch_is_refused(shards, short_run, tmp_path):
    """A run could not start with it; in a mixture too, whose order would have no end."""
    again = shutil.copytree(shards["documents"], tmp_path / "again")
    for place, (fraction, rows) in itertools.product((None, again), ((1e-9, "0 training"), (0.1, "training"))):
        places = [{"path": str(path), "weight": 1.0} for path in (shards["documents"], place) if path]
        message = all_of(f"data_fraction = {fraction}", rows, "batch_documents = 8", "increase")
        with pytest.raises(UsageError, match=message):
            read_order(short_run, [f"data_fraction={fraction}", f"data={json.dumps(places)}"])


def test_a_broken_export_leaves_the_positions_to_the_encoder_and_an_objective_that_cannot_be_made_is_named(short_run):
    (short_run / EXPORT).mkdir()
    (short_run / EXPORT / "config.json").write_text("{")
    task = read_order(short_run).tasks[""]
    assert len(list(StepReader(task, short_run).rows(1))) == 8
    other = replace(task, settings=replace(task.settings, objective=NeedingConfig()))
    with pytest.raises(UsageError, match=all_of("objective needing", "RuntimeError: cannot embed in 1")):
        StepReader(other, short_run)


class Needing(Declutr):
    """An objective of a package that refuses an embedding of one number."""

    def __init__(self, config, run, embedding_size):
        super().__init__(config, run, embedding_size)
        raise RuntimeError(f"cannot embed in {embedding_size}")


class NeedingConfig(DeclutrConfig):
    implementation: ClassVar[str] = f"{__name__}:Needing"
    kind: str = "needing"


@pytest.fixture
def saved_run(tmp_path):
    saving = {"every_steps": 2, "keep_last": 2, "keep_every_steps": 4}
    config = runs.least_config(checkpoint=saving, validation={"every_steps": 2, "score": "mrr"})
    (tmp_path / "config.yaml").write_text(config_yaml(config))
    for step, scores in ((2, {"mrr": 0.75}), (4, {"mrr": 0.5}), (6, {}), (8, {"mrr": 0.25})):
        update = {"documents": 1000 * step, "world_size": 3, "skipped": step // 8}
        state = runs.state_of(step, **scores).model_copy(update=update)
        checkpoint.save(tmp_path / "checkpoints", state, {"encoder.safetensors": {"weight": torch.ones(2**18)}})
    return tmp_path


def test_every_checkpoint_has_a_line_and_folders_of_no_run_are_refused(saved_run, capsys, tmp_path):
    assert main(["inspect", str(saved_run)]) == 0
    first, head, *lines, last = capsys.readouterr().out.splitlines()
    assert (first, last) == (f"Run in {saved_run}: 0 steps logged", "  not exported yet")
    assert head.split()[:3] == ["step", "documents", "age"]
    assert [line.split()[0] for line in lines] == ["2", "4", "6", "8"]
    parts = {0: ("best", "mrr 0.7500"), 1: ("every",), 3: ("last, every", "8,000", "1 steps skipped")}
    for place, line in enumerate(lines):
        assert [part for part in ("verified", " 1.0 ", *parts.get(place, ())) if part not in line] == []
    (tmp_path / "file").write_text("")
    for place, what, *options in (
        (tmp_path / "file", "run"), (tmp_path / "gone", "no such file", "--json"),
        (saved_run / "checkpoints", "run", "--fast"),
    ):  # fmt: skip
        assert main(["inspect", str(place), *options]) == 1
        says(capsys.readouterr().err, place, what)
    for step in (saved_run / "checkpoints").iterdir():
        shutil.rmtree(step)
    assert main(["inspect", str(saved_run)]) == 0
    says(capsys.readouterr().out, "no checkpoint yet")


def test_checkpoints_json_and_status_tell_whether_the_newest_is_whole(saved_run, capsys):
    flip_a_bit(saved_run / "checkpoints" / "step-00000004" / "encoder.safetensors")
    assert main(["inspect", str(saved_run), "--json"]) == 0, "the newest one is whole"
    found = json.loads(capsys.readouterr().out)
    assert [row["broken"] is None for row in found] == [True, False, True, True]
    says(found[1]["broken"], "encoder.safetensors", "altered", "checksum")
    assert [row["kept"] for row in found] == [["best"], [], ["last"], ["last", "every"]]
    assert found[0]["scores"] == {"mrr": 0.75}
    assert found[3]["world_size"] == 3
    assert found[3]["size_bytes"] > 2**20
    assert 0 <= found[3]["age_seconds"] < 600
    hours_ago = time.time() - 7200
    os.utime(saved_run / "checkpoints" / "step-00000002" / "encoder.safetensors", (hours_ago, hours_ago))
    main(["inspect", str(saved_run), "--json"])
    assert json.loads(capsys.readouterr().out)[0]["age_seconds"] < 600, "that of its newest file"
    main(["inspect", str(saved_run), "--json", "--fast"])
    assert not any(row["broken"] for row in json.loads(capsys.readouterr().out)), "its size is right"
    main(["inspect", str(saved_run), "--fast"])
    says(capsys.readouterr().out, "whole by its sizes")
    (saved_run / "checkpoints" / "step-00000008" / "state.json").unlink()
    assert main(["inspect", str(saved_run)]) == 1
    says(capsys.readouterr().out, "BROKEN", "state.json", "missing")


def test_ages_and_sizes_have_the_unit_that_fits():
    ages = ((59.0, "59 s"), (60.0, "1.0 min"), (3600.0, "1.0 h"), (86399.0, "24.0 h"), (86400.0, "1.0 d"))
    for seconds, age in ages:
        _, line = _table([CheckpointRow(4, None, seconds, 10 * 2**20, 1000, 3, 0, {}, [])], "verified")
        assert line.split()[:2] == ["4", "1,000"]
        assert f" {age}      10.0 " in line
