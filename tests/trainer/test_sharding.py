"""Sharded parameters: loss, gradient, update, scores and checkpoints are those of one process that holds everything."""

import math

import pytest
import tiny
import torch
from groups import run_group
from measures import deviation
from messages import says
from safetensors.torch import load_file
from tiny import documents, rank_batch, tiny_collator, tiny_encoder, tiny_train_step
from tinyruns import state_of
from torch.distributed.tensor import DTensor

from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.weights import collect, load
from declutr.trainer.data.plan import Plan
from declutr.trainer.model.language_model import frozen_parameters
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.parallel.communicator import Communicator, full_tensor
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.step import NonFiniteLossError

pytestmark = [pytest.mark.dist, pytest.mark.nightly]
LENGTHS = [48, 70, 49, 131, 60]
UNSELECTED = {"masking": {"mlm_probability": 0.0}}
DROPOUT = {"dropout": 0.2, "attention_dropout": 0.2, "projection": {"kind": "mlp", "size": 6}}
CASES = {
    "queue": {"objective": tiny.OBJECTIVES["queue"], "tokens": 60},
    **{f"nothing selected, {tokens}": {"objective": UNSELECTED, "tokens": tokens} for tokens in (None, 60)},
    "one span at a time": {"tokens": 1},
    "the first rank has one microbatch, the others two": {"tokens": 130},
    "more ranks than documents": {"lengths": LENGTHS[:2]},
    "more ranks than documents, in pieces": {"lengths": LENGTHS[:2], "tokens": 60},
    "bias-corrected": {"tokens": 60, "optim": {"bias_correction": True}},
    "clipped": {"tokens": 60, "optim": {"bias_correction": True, "max_grad_norm": 1e-3}},
    "checkpointed": {"tokens": 60, "encoder": {**DROPOUT, "activation_checkpointing": True}},
    "checkpointed, at once": {"encoder": {**DROPOUT, "activation_checkpointing": True}},
    "a frozen head": {"tokens": 60, "objective": tiny.OBJECTIVES["contrastive"], "frozen": "model.lm_head"},
    "a frozen projection": {"tokens": 60, "objective": tiny.OBJECTIVES["mlm"], "frozen": "projection"},
    "frozen layers": {"tokens": 60, "encoder": {**DROPOUT, "num_trainable_layers": 1}},
    "padded": {"tokens": 60, "encoder": {**DROPOUT, "attention_dropout": 0.0, "layout": "padded"}},
}


def setup(comm, objective=None, lengths=LENGTHS, tokens=None, encoder=DROPOUT, optim=None, frozen="no name", **given):
    """A train step, sharded where there are several ranks, and this rank's share of a batch."""
    config = DeclutrConfig(**(objective or tiny.OBJECTIVES["both"]))
    optim = OptimConfig(**{"lr": 1e-2, "bias_correction": False, **(optim or {})})
    model = tiny_encoder(dtype=given.pop("dtype", torch.float64), **encoder)
    untrained = {id(p) for p in frozen_parameters(model.model, model.config.num_trainable_layers)}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(id(parameter) not in untrained and not name.startswith(frozen))
    settings = {"comm": comm, "microbatch_tokens": tokens, "optim": optim, "sharded": comm.size > 1, **given}
    start, end = Plan(0, len(lengths), len(lengths)).slice(comm.rank, comm.size)
    batch = rank_batch(tiny_collator(config), documents(lengths, 12), start, end)
    return tiny_train_step(model, config, **settings), batch


def weights(train_step):
    return {name: full_tensor(p.detach()).clone() for name, p in train_step.encoder.named_parameters()}


def moments(train_step):
    states = [train_step.optimizer.state[p] for p in train_step.encoder.parameters()]
    return [full_tensor(value).clone() for state in states for key, value in state.items() if key != "step"]


def one_step(comm):
    results = {}
    for name, case in CASES.items():
        train_step, batch = setup(comm, **case)
        [found] = train_step.gradients({"": batch}, 1)
        parameters = [p for p in train_step.encoder.parameters() if p.requires_grad]
        assert all(isinstance(p, DTensor) == (comm.size > 1) for p in train_step.encoder.parameters())
        train_step.comm.all_reduce_gradients(parameters)
        gradients = [full_tensor(p.grad).clone() for p in parameters]
        losses = [found.terms.get("contrastive", torch.zeros(())).item(), comm.all_reduce_sum(found.mlm_sum).item()]
        metrics, queue = train_step.step({"": batch}, 1), train_step.tasks[0].objective.queue
        counts = [metrics.loss, metrics.grad_norm, metrics.num_tokens, metrics.num_selected, metrics.flops]
        queues = [torch.zeros(1) if queue is None else queue]
        results[name] = losses, gradients, list(weights(train_step).values()), moments(train_step), queues, counts
    return results


@pytest.fixture(scope="module")
def alone():
    return one_step(Communicator())


@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks_takes_the_same_step(size, alone):
    """test_gradients.py has the objectives, test_families.py the families."""
    first, *others = run_group(size, one_step)
    for name, (*expected, counts) in alone.items():
        assert max(g.abs().max() for g in expected[1]) > 0 or name.startswith("nothing")
        *found, its_counts = first[name]
        assert all(deviation(tensors, other) < 1e-10 for tensors, other in zip(found, expected, strict=True)), name
        assert its_counts[:2] == pytest.approx(counts[:2], rel=1e-10), name
        assert its_counts[2:] == pytest.approx(counts[2:], rel=1e-12), name
        for other in others:  # and the same bits on each
            assert other[name][5] == its_counts, name
            assert all(torch.equal(*pair) for pair in zip(found[2], other[name][2], strict=True)), name


def held(comm):
    """Bytes of parameters, gradients and moments that this rank keeps between two steps, each piece counted once."""
    train_step, batch = setup(comm, tokens=60)
    train_step.step({"": batch}, 1)
    parameters, sizes = list(train_step.encoder.parameters()), []
    states = [value for p in parameters for value in train_step.optimizer.state[p].values()]
    for kind in (parameters, [p.grad for p in parameters], states):
        local = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in kind]
        sizes.append(sum({storage.data_ptr(): storage.nbytes() for storage in local}.values()))
    return sizes


def test_a_rank_keeps_its_part_alone():
    single = held(Communicator())
    for kept in run_group(2, held):
        assert all(part < 0.52 * everything for part, everything in zip(kept, single, strict=True))


def autocast_and_compiled(comm):
    """Gradients of products in bfloat16; losses and weights of two steps of a compiled encoder, if it is sharded."""
    train_step, batch = setup(comm, tokens=60, dtype=torch.float32, autocast=torch.bfloat16)
    train_step.gradients({"": batch}, 1)
    train_step.comm.all_reduce_gradients(list(train_step.encoder.parameters()))
    gradients = torch.cat([full_tensor(p.grad).flatten() for p in train_step.encoder.parameters()])
    train_step, batch = setup(comm, encoder={"dropout": 0.2, "compile": comm.size > 1})
    losses = [train_step.step({"": batch}, number).loss for number in (1, 2)]
    return gradients, losses, list(weights(train_step).values())


@pytest.mark.slow
def test_autocast_is_that_of_one_process_within_its_precision_and_a_compiled_encoder_can_be_sharded():
    expected, losses, parameters = autocast_and_compiled(Communicator())
    for gradients, its_losses, its_parameters in run_group(2, autocast_and_compiled):
        assert gradients.dtype == torch.float32
        assert torch.cosine_similarity(gradients, expected, dim=0) > 0.99
        assert deviation(its_losses, losses) < 1e-10
        assert deviation(its_parameters, parameters) < 1e-10


def not_finite(comm):
    """One rank's share of one weight is not finite: every rank must stop alike, nothing may be updated."""
    messages = []
    for tokens in (None, 60):
        train_step, batch = setup(comm, tokens=tokens)
        train_step.step({"": batch}, 1)
        before = weights(train_step)
        if comm.rank == 0:
            with torch.no_grad():
                train_step.encoder.model.base_model.embeddings.LayerNorm.bias.to_local()[0] = math.nan
        poisoned = moments(train_step)
        with pytest.raises(NonFiniteLossError) as stopped:
            train_step.step({"": batch}, 2)
        changed = [name for name, value in weights(train_step).items() if not torch.equal(value, before[name])]
        same_moments = all(torch.equal(*pair) for pair in zip(poisoned, moments(train_step), strict=True))
        messages.append((str(stopped.value), changed, same_moments))
    return messages


def test_a_loss_that_is_not_finite_stops_every_rank():
    for results in run_group(3, not_finite):
        for message, changed, same_moments in results:
            says(message, "step 2", "loss nan")
            assert changed == ["model.roberta.embeddings.LayerNorm.bias"]
            assert same_moments


def steps(comm, folder, first, last, start=None, sharded=True, **given):
    """Takes the steps first..last, from a checkpoint where there is one, and writes a checkpoint after the last."""
    train_step, batch = setup(comm, tiny.OBJECTIVES["queue"], tokens=60, sharded=sharded and comm.size > 1, **given)
    if start is not None:
        load(start, [train_step])
    for number in range(first, last + 1):
        train_step.step({"": batch}, number)
    contents = collect([train_step], keep=comm.rank == 0)
    assert all(contents.values()) == (comm.rank == 0)
    if comm.rank == 0:
        checkpoint.save(folder, state_of(last).model_copy(update={"world_size": comm.size}), contents)
    comm.all_reduce_max(0)  # nobody reads before it is written
    return checkpoint.checkpoint_path(folder, last)


def whole_and_cut(comm, folder, from_single, given):
    """Four steps at once, and four steps with a change of everything in the middle, by several ranks."""
    steps(comm, folder / "whole", 1, 4, **given)
    half = steps(comm, folder / "half", 1, 2, **given)
    unsharded = steps(comm, folder / "unsharded half", 1, 2, sharded=False, **given)
    steps(comm, folder / "then unsharded", 3, 4, half, sharded=False, **given)
    for name, start in (("again", half), ("then sharded", unsharded), ("from one process", from_single)):
        steps(comm, folder / name, 3, 4, start, **given)


def tensors(path):
    return {f"{f.name}:{key}": t for f in sorted(path.glob("*.safetensors")) for key, t in load_file(f).items()}


@pytest.mark.parametrize("correction", [True, False], ids=["AdamW", "released AdamW"])
def test_checkpoints_are_those_of_an_unsharded_run(tmp_path, correction):
    """A sharded run goes on to the bit; sharded, unsharded and single runs go on from each other's checkpoints."""
    given = {"optim": {"bias_correction": correction}}
    from_single = steps(Communicator(), tmp_path / "single half", 1, 2, **given)
    single = tensors(steps(Communicator(), tmp_path / "single", 1, 4, **given))
    run_group(3, whole_and_cut, tmp_path, from_single, given)
    half = checkpoint.checkpoint_path(tmp_path / "half", 2)
    assert checkpoint.read_state(half).world_size == 3
    steps(Communicator(), tmp_path / "to one process", 3, 4, half, **given)
    whole_run, again = (tensors(checkpoint.checkpoint_path(tmp_path / name, 4)) for name in ("whole", "again"))
    assert whole_run.keys() == again.keys() == single.keys()
    assert all(torch.equal(tensor, again[key]) for key, tensor in whole_run.items())
    for name in ("whole", "then unsharded", "then sharded", "from one process", "to one process"):
        found = tensors(checkpoint.checkpoint_path(tmp_path / name, 4))
        assert {key: t.dtype for key, t in found.items()} == {key: t.dtype for key, t in single.items()}, name
        assert deviation([found[key] for key in single], single.values()) < 1e-10, name
