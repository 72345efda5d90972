"""Auxiliary tasks: gradients for any number of workers and cuts, alone or together, from texts, images, sounds."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from groups import run_group
from measures import deviation
from rows import Rows, clip_rows, image_rows, sentences
from states import state_of
from tiny import VOCABULARY, tiny_encoder

from declutr.trainer.build import used_parameters
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.weights import collect, load, step_parameters
from declutr.trainer.data.batches import collated
from declutr.trainer.data.chunks import fetched
from declutr.trainer.data.plan import Plan
from declutr.trainer.model.config import FrontendConfig
from declutr.trainer.model.frontend import Frontend, embedding_width
from declutr.trainer.objectives.base import SHARED_ROWS
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.simcse import Simcse
from declutr.trainer.objectives.supcon.config import MaskConfig, SupconConfig
from declutr.trainer.objectives.supcon.objective import Supcon
from declutr.trainer.objectives.text_config import SimcseConfig
from declutr.trainer.parallel.communicator import Communicator, full_tensor, shard
from declutr.trainer.parallel.reducers import FixedPointReducer
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.gradcache import Microbatch
from declutr.trainer.step.optim import build_optimizer
from declutr.trainer.step.step import NonFiniteLosses, TrainStep
from declutr.trainer.step.task import TrainTask
from declutr.trainer.worker.loop import take

ROWS = {
    "": sentences([5, 12, 9, 7, 3]),
    "image": image_rows([(12, 10), (9, 9), (8, 15), (20, 8)]),
    "audio": clip_rows([9, 4, 13, 2, 7]),
    "more": sentences([4, 9, 6, 11], seed=1),
}
FRONTENDS = {
    "image": FrontendConfig(patch_size=(4, 4), image_size=8),
    "audio": FrontendConfig(patch_size=(3, 2), positions=False),
}
SHAPES = {"image": (48, 4, (0.5, 0.5)), "audio": (6, 12, (0.0, 1.0))}


MIXUP = 0.6


def task_of(encoder, name, comm, tokens, weight):
    context = RunContext(seed=len(name), batch_documents=len(ROWS[name]), frontend=FRONTENDS.get(name))
    config = (
        SupconConfig(
            temperature=0.2,
            masks=MaskConfig(freq_mask=2, time_mask=3),
            mixup=MIXUP,
            matryoshka={"sizes": [5, "all"], "weights": [0.3, 1.0]},
        )
        if name in SHAPES
        else SimcseConfig()
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(name))
        objective = (Supcon if name in SHAPES else Simcse)(config, context, encoder.embedding_size)
    frontend = None
    if name in SHAPES:
        values, places, normal = SHAPES[name]
        frontend = Frontend(FRONTENDS[name], values, places, embedding_width(encoder.model), 5, normal).double()
    return TrainTask(
        encoder=encoder,
        objective=objective.double().train(),
        comm=comm,
        seed=context.seed,
        microbatch=Microbatch(tokens),
        name=name,
        frontend=frontend,
        weight=weight,
        shared_rows=0 if comm.size == 3 else SHARED_ROWS,  # three workers share the losses
    )


def train_steps_of(encoder, names, comm=None, tokens=None, joint=True, weight=0.7, lr=1e-2, sharded=False):
    """Train steps as `build_train_steps` makes them."""
    comm = comm or Communicator()
    tasks = [task_of(encoder, name, comm, tokens, weight if name else 1.0) for name in ("", *names)]
    if sharded:
        shard(encoder, comm)
    groups = [tasks] if joint else [[one] for one in (*tasks[1:], tasks[0])]
    train_steps = []
    for group in groups:
        optim = OptimConfig(lr=lr if group[0].name else 1e-2)
        modules = [part for one in group for part in (one.objective, one.frontend) if part is not None]
        optimizer = build_optimizer(optim, encoder, *modules, reached=used_parameters(encoder, group))
        train_steps.append(TrainStep(tasks=tuple(group), optimizer=optimizer, optim=optim, total_steps=10))
    return train_steps


def share_of(task, comm, epoch=1):
    rows = ROWS[task.name]
    start, end = Plan(0, len(rows), len(rows)).slice(comm.rank, comm.size)
    return collator_of(task).collate(rows_of(task, start, end, epoch), np.full(end - start, epoch))


def collator_of(task):
    return task.objective.collator(VOCABULARY, 30)


def rows_of(task, start, end, epoch):
    """Rows of a task as its collator gets them."""
    rows = Rows(ROWS[task.name])
    return fetched(rows, np.arange(start, end), np.full(end - start, epoch), getattr(collator_of(task), "fetch", None))


def batch_of(train_steps, comm=None, epoch=1):
    comm = comm or Communicator()
    return {one.name: share_of(one, comm, epoch) for train_step in train_steps for one in train_step.tasks}


def gradients(names, comm=None, tokens=None, joint=True, sharded=False, **encoder):
    """Gradients of each task by name, and the terms."""
    made = tiny_encoder(**({"dropout": 0.2, "attention_dropout": 0.1} | encoder))
    train_steps = train_steps_of(made, names, comm, tokens, joint, sharded=sharded)
    batch, found, terms = batch_of(train_steps, comm), {}, {}
    for train_step in train_steps:
        train_step.optimizer.zero_grad(set_to_none=True)
        parts = train_step.gradients(batch, 1)
        reached = {id(p) for group in train_step.optimizer.param_groups for p in group["params"]}
        parameters = {name: p for name, p in step_parameters(train_step).items() if id(p) in reached}
        train_step.comm.all_reduce_gradients(list(parameters.values()))
        found |= {f"{train_step.name} {name}": full_tensor(p.grad).clone() for name, p in parameters.items()}
        for task, part in zip(train_step.tasks, parts, strict=True):
            terms |= {f"{task.name}_{term}": value.item() for term, value in part.terms.items()}
    return found, terms


CASES = {
    "image, joint": (("image",), True),
    "audio and image, alternating": (("audio", "image"), False),
    "texts and audio, joint": (("more", "audio"), True),
}


def apart(found, expected):
    """Largest deviation of encoder, objectives and frontends, each on its own scale."""
    parts = {}
    for name in expected:
        task, parameter = name.split(" ")
        kept = parameter.split(".")[: 3 if parameter.startswith("also") else 1]
        parts.setdefault((task, *(kept if kept[0] in ("also", "objective") else ())), []).append(name)
    return max(deviation([found[n] for n in names], [expected[n] for n in names]) for names in parts.values())


def every_case(comm, sharded):
    return {
        name: [gradients(names, comm=comm, tokens=tokens, joint=joint, sharded=sharded) for tokens in (None, 20)]
        for name, (names, joint) in CASES.items()
    }


def bits(comm):
    """Parameters after two steps with fixed-point sums, by case; each update has sums of its own."""
    comm, found = replace(comm, deterministic=True), {}
    for name, (names, joint) in CASES.items():
        train_steps = []
        for made in train_steps_of(tiny_encoder(dropout=0.2), names, comm, joint=joint):
            reducer = FixedPointReducer(comm, [p for group in made.optimizer.param_groups for p in group["params"]], 99)
            train_steps.append(replace(made, tasks=tuple(replace(one, reducer=reducer) for one in made.tasks)))
        for step in (1, 2):
            batch = {}
            for one in [each for train_step in train_steps for each in train_step.tasks]:
                rows = ROWS[one.name]
                start, end = Plan(0, len(rows), len(rows), 1).slice(comm.rank, comm.size)
                epochs = np.full(end - start, step)
                batch[one.name] = collated(collator_of(one), rows_of(one, start, end, step), epochs, start, 1)
            for train_step in train_steps:
                train_step.step(batch, step)
        named = {f"{one.name} {key}": p for one in train_steps for key, p in step_parameters(one).items()}
        found[name] = {key: p.detach().clone() for key, p in named.items()}
    return found


@pytest.mark.dist
def test_fixed_point_sums_have_the_same_bits_with_any_number_of_workers():
    alone = bits(Communicator())
    for results in run_group(3, bits):
        for name, parameters in results.items():
            different = [key for key, value in parameters.items() if not torch.equal(value, alone[name][key])]
            assert not different, name


@pytest.fixture(scope="module")
def single():
    return {name: gradients(names, joint=joint) for name, (names, joint) in CASES.items()}


@pytest.mark.dist
@pytest.mark.parametrize(("size", "sharded"), [(2, False), (3, False), (2, True)])
def test_tasks_give_equal_gradients_on_any_number_of_workers(single, size, sharded):
    """Dropout is on; rows are shared unevenly, and the tasks have different numbers of them."""
    for rank in run_group(size, every_case, sharded):
        for name, results in rank.items():
            for found, terms in results:
                assert apart(found, single[name][0]) < 1e-10, name
                assert terms == pytest.approx(single[name][1], rel=1e-10), name


@pytest.mark.parametrize("name", CASES)
def test_microbatches_and_layouts_change_nothing(single, name):
    names, joint = CASES[name]
    for how in ({"tokens": 20}, {"tokens": 1}, {"layout": "padded"}):
        found, terms = gradients(names, joint=joint, **how)
        assert apart(found, single[name][0]) < 1e-10, how
        assert terms == pytest.approx(single[name][1], rel=1e-10)


def trained(names, steps=3, **how):
    """The encoder's parameters after some steps."""
    encoder = tiny_encoder(dropout=0.2)
    train_steps = train_steps_of(encoder, names, **how)
    for step in range(1, steps + 1):
        take(train_steps, batch_of(train_steps, epoch=step), step)
    return {name: p.detach().clone() for name, p in encoder.named_parameters()}


@pytest.mark.parametrize("how", [{"joint": True, "weight": 0.0}, {"joint": False, "lr": 0.0}])
def test_a_task_without_weight_or_rate_leaves_the_main_one_alone(how):
    alone, beside = trained(()), trained(("image", "more"), **how)
    assert deviation(beside.values(), alone.values()) < 1e-12
    weighty = trained(("image",), joint=how["joint"])
    assert deviation(weighty.values(), alone.values()) > 1e-4, "with both, it does not"


@pytest.mark.parametrize("joint", [True, False])
def test_the_logged_loss_is_the_weighted_sum_of_the_tasks_losses(joint):
    train_steps = train_steps_of(tiny_encoder(dropout=0.2), ("image",), joint=joint)
    line = take(train_steps, batch_of(train_steps), 1).line()
    assert line["loss"] == pytest.approx(line["contrastive"] + 0.7 * line["image_supcon"], rel=1e-12)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("name", SHAPES)
def test_packed_clips_equal_clips_one_by_one(name, layout):
    encoder = tiny_encoder(dropout=0.0, layout=layout)
    task = task_of(encoder, name, Communicator(), None, 1.0)
    clips = share_of(task, Communicator()).spans
    together = encoder(clips, task.frontend)[0]
    alone = [encoder(clips.span_slice(i, i + 1), task.frontend)[0] for i in range(clips.num_spans)]
    assert len(set(clips.lengths.tolist())) > (name == "audio")
    assert deviation([together], [torch.cat(alone)]) < 1e-12


def test_a_bad_loss_stops_or_skips_its_own_turn():
    """The main task is updated, the metrics name the task, and its counter counts alone."""
    encoder = tiny_encoder(dropout=0.2)
    made = train_steps_of(encoder, ("image",), joint=False)
    train_steps = [replace(one, nonfinite_losses=NonFiniteLosses(True, 3)) for one in made]
    with torch.no_grad():
        train_steps[0].tasks[0].frontend.cls.fill_(float("nan"))
    before = {name: p.detach().clone() for name, p in encoder.named_parameters()}
    measured = take(train_steps, batch_of(train_steps), 1)
    assert measured.auxiliary["image_skipped"]
    assert not measured.skipped
    assert [one.nonfinite_losses.skipped for one in train_steps] == [1, 0]
    assert any(not torch.equal(p, before[name]) for name, p in encoder.named_parameters())
    assert all(bool(p.isfinite().all()) for p in encoder.parameters())


def test_views_of_a_clip_depend_on_row_and_epoch_alone():
    encoder = tiny_encoder(dropout=0.0)
    for name in SHAPES:
        task = task_of(encoder, name, Communicator(), None, 1.0)
        collator, size = collator_of(task), len(ROWS[name])
        whole_batch = collator.collate(rows_of(task, 0, size, 2), np.full(size, 2)).spans
        one = collator.collate(rows_of(task, 2, 3, 2), np.array([2])).spans
        assert torch.equal(one.values, whole_batch.span_slice(4, 6).values)
        assert torch.equal(one.keys, whole_batch.keys[4:6])
        other = collator.collate(rows_of(task, 2, 3, 3), np.array([3])).spans
        assert not torch.equal(other.values, one.values)
        first, second = one.span_slice(0, 1), one.span_slice(1, 2)
        assert not torch.equal(first.values, second.values)
        digests = [collator.collate(rows_of(task, i, i + 1, 2), np.array([2])).spans.digest() for i in range(size)]
        assert sum(digests) % 2**40 == whole_batch.digest()


@pytest.mark.parametrize("joint", [True, False])
def test_a_resumed_run_takes_the_same_steps(tmp_path, joint):
    """Encoder, heads, frontends and the moments of every optimizer come back from a checkpoint."""

    def begun():
        return train_steps_of(tiny_encoder(dropout=0.2), ("image", "audio"), joint=joint)

    train_steps = begun()
    whole_run = [take(train_steps, batch_of(train_steps, epoch=step), step) for step in (1, 2)]
    path = checkpoint.save(tmp_path, state_of(2), collect(train_steps))
    whole_run += [take(train_steps, batch_of(train_steps, epoch=step), step) for step in (3, 4)]
    train_steps = begun()
    take(train_steps, batch_of(train_steps, epoch=9), 1)  # other weights and moments
    load(path, train_steps)
    for step in (3, 4):
        assert take(train_steps, batch_of(train_steps, epoch=step), step) == whole_run[step - 1]
