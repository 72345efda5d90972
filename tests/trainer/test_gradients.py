"""One law for every objective, alone and as tasks of one run: however a batch is cut and shared out, steps are equal.

Dropout is on. Workers share rows unevenly, and rows differ in their numbers of spans.
"""

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
import torch
from cases import AUXILIARY, CASES, batch_of, collator_of, of_tasks, rows_of, task_of, train_steps_of
from groups import run_group
from measures import deviation
from tiny import SHORT_LENGTHS, tiny_encoder, with_task
from tinyruns import state_of

from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.weights import collect, load, step_parameters
from declutr.trainer.data.packedbatch import DIGEST
from declutr.trainer.objectives import simcse
from declutr.trainer.objectives.base import SHARED_ROWS
from declutr.trainer.parallel.communicator import Communicator, full_tensor
from declutr.trainer.parallel.reducers import FixedPointReducer
from declutr.trainer.step.gradcache import Microbatch
from declutr.trainer.step.step import NonFiniteLosses
from declutr.trainer.worker.loop import take

# on groups of workers, some objectives on short documents
SHARED = [name for name in CASES if not name.endswith(tuple(SHORT_LENGTHS)) or "both" in name or "unmasked" in name]
FIXED = [name for name in CASES if not name.startswith("declutr")]  # test_elastic_determinism has DeCLUTR


def gradients(case, **how):
    """Gradients by task and parameter, terms of the loss and sums of MLM by task."""
    train_steps = train_steps_of(case, **how)
    batch, by_parameter, terms = batch_of(case, train_steps), {}, {}
    for train_step in train_steps:
        train_step.optimizer.zero_grad(set_to_none=True)
        parts = train_step.gradients(batch, 1)
        reached = {id(p) for group in train_step.optimizer.param_groups for p in group["params"]}
        parameters = {name: p for name, p in step_parameters(train_step).items() if id(p) in reached}
        train_step.comm.all_reduce_gradients(list(parameters.values()))
        by_parameter |= {f"{train_step.name} {name}": full_tensor(p.grad).clone() for name, p in parameters.items()}
        for task, part in zip(train_step.tasks, parts, strict=True):
            terms |= {f"{task.name}_{term}": value.item() for term, value in part.terms.items()}
            terms[f"{task.name} mlm"] = train_step.comm.all_reduce_sum(part.mlm_sum).item()
            terms[f"{task.name} selected"] = part.num_selected
    return by_parameter, terms


def stepped(case, **how):
    """Numbers of two steps, then the tensors of a checkpoint: parameters, moments, statistics, queues."""
    train_steps = train_steps_of(case, norm=1e-3, **how)  # every gradient is clipped
    lines = [take(train_steps, batch_of(case, train_steps, epoch=step), step).line() for step in (1, 2)]
    contents = collect(train_steps)
    return lines, {f"{file} {name}": value for file, table in contents.items() for name, value in table.items()}


def apart(found, expected):
    """Largest deviation of encoder, objectives and frontends, each on its own scale."""
    assert found.keys() == expected.keys()
    parts = {}
    for name in expected:
        task, parameter = name.split(" ")
        kept = parameter.split(".")[: 3 if parameter.startswith("also") else 1]
        parts.setdefault((task, *(kept if kept[0] in ("also", "objective") else ())), []).append(name)
    return max(deviation([found[n] for n in names], [expected[n] for n in names]) for names in parts.values())


def equal(found, expected, limit=1e-10):
    assert apart(found[0], expected[0]) < limit
    assert found[1] == pytest.approx(expected[1], rel=1e-10)


def every_case(comm, sharded, shared_rows):
    how = {"comm": comm, "sharded": sharded, "shared_rows": shared_rows}
    return {name: (gradients(CASES[name], tokens=40, **how), stepped(CASES[name], **how)) for name in SHARED}


def bits(comm):
    """Tensors of a checkpoint after two steps with fixed-point sums, and the lines of the steps, by case."""
    comm, by_case = replace(comm, deterministic=True), {}
    for name in FIXED:
        train_steps = []
        for plain in train_steps_of(CASES[name], comm):
            parameters = [p for group in plain.optimizer.param_groups for p in group["params"]]
            reducer = FixedPointReducer(comm, parameters, 99)  # each update has sums of its own
            train_steps.append(replace(plain, tasks=tuple(replace(task, reducer=reducer) for task in plain.tasks)))
        lines = [take(train_steps, batch_of(CASES[name], train_steps, step, unit=1), step).line() for step in (1, 2)]
        by_case[name] = lines, collect(train_steps)
    return by_case


@cache
def alone(name):
    return gradients(CASES[name])


@cache
def stepped_alone(name):
    return stepped(CASES[name])


def test_statistics_of_a_batch_do_not_depend_on_microbatches():
    whole, pieces = (stepped(CASES["scd"], tokens=tokens)[1] for tokens in (None, 40))
    names = [name for name in whole if "running" in name]
    assert len(names) == 4
    assert deviation(*([table[name] for name in names] for table in (pieces, whole))) < 1e-12


def test_workers_do_not_share_a_loss_that_a_subclass_has_written():
    """It need not know of shares: gradients of its layers would be counted once for each worker."""
    own = type("Own", (simcse.Simcse,), {"loss": lambda self, batch: simcse.Simcse.loss(self, batch)})
    assert (simcse.Simcse.shards_rows, own.shards_rows, type("Same", (own,), {}).shards_rows) == (True, False, False)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("size", "sharded", "shared_rows"),
    [(2, False, SHARED_ROWS), (3, False, 0), pytest.param(2, True, 0, marks=pytest.mark.nightly)],
)
def test_steps_are_equal_on_any_number_of_workers(size, sharded, shared_rows):
    """With `shared_rows` of 0, workers share the loss where its objective allows it."""
    first, *replicas = run_group(size, every_case, sharded, shared_rows)
    for name, (gradients_of_case, (lines, tensors)) in first.items():
        equal(gradients_of_case, alone(name))
        expected_lines, expected = stepped_alone(name)
        for line, expected_line in zip(lines, expected_lines, strict=True):
            assert line == pytest.approx(expected_line | {"padding_share": line["padding_share"]}, rel=1e-9), name
        assert apart(tensors, expected) < 1e-7, name
        for replica in replicas:  # they may not drift apart by even one bit
            its_lines, its_tensors = replica[name][1]
            assert lines == its_lines, name
            assert all(torch.equal(value, its_tensors[key]) for key, value in tensors.items()), name


def without_memory(comm):
    """The term of a shared loss of several sizes; memory of the last rank was too small for the first of them."""
    failures = [torch.OutOfMemoryError("given to this test")] * (comm.rank == comm.size - 1)
    case, log_sums = CASES["simcse with sizes"], simcse._Scores.log_sums

    def failing(scores):
        if failures:
            raise failures.pop()
        return log_sums(scores)

    train_step = with_task(*train_steps_of(case, comm, shared_rows=0), microbatch=Microbatch(60, automatic=True))
    with patch.object(simcse._Scores, "log_sums", failing):
        (task,) = train_step.gradients(batch_of(case, [train_step]), 1)
    return task.terms["contrastive"].item(), train_step.tasks[0].microbatch.max_tokens < 60


@pytest.mark.dist
def test_a_loss_of_several_sizes_is_repeated_if_a_worker_lacks_memory():
    expected = pytest.approx(alone("simcse with sizes")[1]["_contrastive"], rel=1e-10)
    assert run_group(2, without_memory) == [(expected, True)] * 2


@pytest.mark.dist
def test_fixed_point_sums_have_the_same_bits_with_any_number_of_workers():
    expected = bits(Communicator())
    for results in run_group(3, bits):
        for name, (lines, contents) in results.items():
            assert lines == expected[name][0], name
            for file, tensors in expected[name][1].items():
                assert all(torch.equal(contents[file][key], value) for key, value in tensors.items()), (name, file)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("name", CASES)
def test_microbatches_layout_and_order_change_nothing(name, layout):
    """Permuting the rows permutes the views; nothing is drawn by their place."""
    case, main = CASES[name], CASES[name].sources[""]
    order = np.random.default_rng(1).permutation(len(main.rows))
    permuted = replace(case, sources=case.sources | {"": replace(main, rows=main.rows.take(order).combine_chunks())})
    for variant, tokens in ((case, 40), (case, 14), (permuted, None)):
        equal(gradients(variant, tokens=tokens, layout=layout), alone(name))


def clips_of(task, start=0, end=None, epoch=1):
    source = AUXILIARY[task.name]
    end = len(source.rows) if end is None else end
    return collator_of(task).collate(rows_of(task, source, start, end, epoch), np.full(end - start, epoch)).spans


def trained(*names, joint=True, **how):
    case = of_tasks(*names, joint=joint)
    train_steps = train_steps_of(case, attention_dropout=0.0, **how)
    for step in (1, 2, 3):
        take(train_steps, batch_of(case, train_steps, step), step)
    return {name: p.detach().clone() for name, p in train_steps[0].encoder.named_parameters()}


@pytest.mark.parametrize("how", [{"joint": True, "weight": 0.0}, {"joint": False, "lr": 0.0}])
def test_a_task_without_weight_or_rate_leaves_the_main_one_alone(how):
    alone, beside = trained(), trained("image", "more", **how)
    assert deviation(beside.values(), alone.values()) < 1e-12
    weighty = trained("image", joint=how["joint"])
    assert deviation(weighty.values(), alone.values()) > 1e-4, "with both, it does not"


def test_the_logged_loss_is_the_weighted_sum_and_a_bad_one_skips_its_own_turn():
    """The main task is updated, the metrics name the task, and its counter counts alone."""
    for joint in (True, False):
        case = of_tasks("image", joint=joint)
        train_steps = train_steps_of(case)
        line = take(train_steps, batch_of(case, train_steps), 1).line()
        assert line["loss"] == pytest.approx(line["contrastive"] + 0.7 * line["image_supcon"], rel=1e-12)
    train_steps = [replace(turn, nonfinite_losses=NonFiniteLosses(True, 3)) for turn in train_steps_of(case)]
    encoder = train_steps[0].encoder
    with torch.no_grad():
        train_steps[0].tasks[0].frontend.cls.fill_(float("nan"))
    before = {name: p.detach().clone() for name, p in encoder.named_parameters()}
    measured = take(train_steps, batch_of(case, train_steps), 1)
    assert measured.auxiliary["image_skipped"]
    assert not measured.skipped
    assert [turn.nonfinite_losses.skipped for turn in train_steps] == [1, 0]
    assert any(not torch.equal(p, before[name]) for name, p in encoder.named_parameters())
    assert all(bool(p.isfinite().all()) for p in encoder.parameters())


@pytest.mark.parametrize("name", ["image", "audio"])
def test_views_of_a_clip_depend_on_row_and_epoch_alone(name):
    task, size = task_of(tiny_encoder(), name, AUXILIARY[name]), len(AUXILIARY[name].rows)
    whole, views = clips_of(task, epoch=2), clips_of(task, 2, 3, epoch=2)
    assert torch.equal(views.values, whole.span_slice(4, 6).values)
    assert torch.equal(views.keys, whole.keys[4:6])
    assert not torch.equal(clips_of(task, 2, 3, epoch=3).values, views.values)
    assert not torch.equal(views.span_slice(0, 1).values, views.span_slice(1, 2).values)
    assert sum(clips_of(task, i, i + 1, epoch=2).digest() for i in range(size)) % DIGEST == whole.digest()


@pytest.mark.parametrize("case", [CASES["scd"], *(of_tasks("image", "audio", joint=joint) for joint in (True, False))])
def test_a_resumed_run_takes_the_same_steps(tmp_path, case):
    """Encoder, heads, statistics, frontends and the moments of every optimizer come back from a checkpoint."""

    def taken(train_steps, *steps):
        return [take(train_steps, batch_of(case, train_steps, step), step) for step in steps]

    train_steps = train_steps_of(case)
    taken(train_steps, 1, 2)
    path = checkpoint.save(tmp_path, state_of(2), collect(train_steps))
    expected = taken(train_steps, 3, 4)
    train_steps = train_steps_of(case)
    taken(train_steps, 9)  # other weights and moments
    load(path, train_steps)
    assert taken(train_steps, 3, 4) == expected
