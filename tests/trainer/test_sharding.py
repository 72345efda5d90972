"""Sharded parameters: loss, gradient, update, scores and checkpoints are those of one process that holds everything."""

import functools
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
OBJECTIVES = {name: tiny.OBJECTIVES[name] for name in ("both", "mlm", "contrastive", "queue")}
OBJECTIVES["nothing selected"] = {"masking": {"mlm_probability": 0.0}}
DROPOUT = {"dropout": 0.2, "attention_dropout": 0.2, "projection": {"kind": "mlp", "size": 6}}
CASES = {
    **{f"{name}, 60": {"objective": given, "tokens": 60} for name, given in OBJECTIVES.items()},
    **{f"{name}, None": {"objective": OBJECTIVES[name]} for name in ("both", "mlm", "nothing selected")},
    "one span at a time": {"tokens": 1},
    "the first rank has one microbatch, the others two": {"tokens": 130},
    "more ranks than documents": {"lengths": LENGTHS[:2]},
    "more ranks than documents, in pieces": {"lengths": LENGTHS[:2], "tokens": 60},
    "bias-corrected": {"tokens": 60, "optim": {"bias_correction": True}},
    "clipped": {"tokens": 60, "optim": {"bias_correction": True, "max_grad_norm": 1e-3}},
    "checkpointed": {"tokens": 60, "encoder": {**DROPOUT, "activation_checkpointing": True}},
    "checkpointed, at once": {"encoder": {**DROPOUT, "activation_checkpointing": True}},
    "a frozen head": {"tokens": 60, "objective": OBJECTIVES["contrastive"], "frozen": "model.lm_head"},
    "a frozen projection": {"tokens": 60, "objective": OBJECTIVES["mlm"], "frozen": "projection"},
    "frozen layers": {"tokens": 60, "encoder": {**DROPOUT, "num_trainable_layers": 1}},
    "padded": {"tokens": 60, "encoder": {**DROPOUT, "attention_dropout": 0.0, "layout": "padded"}},
    "bert": {"tokens": 60, "family": "bert"},
    "modernbert": {"tokens": 60, "family": "modernbert", "encoder": {"dropout": 0.2}},
}
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5}


def setup(comm, objective=None, lengths=LENGTHS, tokens=None, encoder=DROPOUT, family="roberta", optim=None, **given):
    """A train step, sharded where there are several ranks, and this rank's share of a batch."""
    config = DeclutrConfig(**(objective or OBJECTIVES["both"]))
    optim = OptimConfig(**{"lr": 1e-2, "bias_correction": False, **(optim or {})})
    model = tiny_encoder(family, given.pop("dtype", torch.float64), **encoder)
    frozen = given.pop("frozen", None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or not name.startswith(frozen))
    for parameter in frozen_parameters(model.model, model.config.num_trainable_layers):
        parameter.requires_grad_(False)
    made = {"comm": comm, "microbatch_tokens": tokens, "optim": optim, "sharded": comm.size > 1, **given}
    train_step = tiny_train_step(model, config, **made)
    start, end = Plan(0, len(lengths), len(lengths)).slice(comm.rank, comm.size)
    return train_step, rank_batch(tiny_collator(config), documents(lengths, 12), start, end)


def weights(train_step):
    return {name: full_tensor(p.detach()).clone() for name, p in train_step.encoder.named_parameters()}


def moments(train_step):
    states = [train_step.optimizer.state[p] for p in train_step.encoder.parameters()]
    return [full_tensor(value).clone() for state in states for key, value in state.items() if key != "step"]


def one_step(comm, dtype, cases):
    """Loss and gradient of a batch; after a step metrics, weights and moments."""
    results = []
    for case in cases:
        train_step, batch = setup(comm, dtype=dtype, **case)
        [found] = train_step.gradients({"": batch}, 1)
        parameters = [p for p in train_step.encoder.parameters() if p.requires_grad]
        assert all(isinstance(p, DTensor) == (comm.size > 1) for p in train_step.encoder.parameters())
        train_step.comm.all_reduce_gradients(parameters)
        gradients = [full_tensor(p.grad).clone() for p in parameters]
        losses = [found.terms.get("contrastive", torch.zeros(())).item(), comm.all_reduce_sum(found.mlm_sum).item()]
        metrics = train_step.step({"": batch}, 1)
        queue = train_step.tasks[0].objective.queue
        results.append((losses, gradients, metrics, weights(train_step), moments(train_step), queue))
    return results


@functools.cache
def one_step_alone(dtype):
    """Cases by name, and what one process comes to."""
    # in float32 moments of entries that are zero but for rounding are noise: fewer cases, the gradient only
    cases = CASES if dtype == torch.float64 else {name: CASES[name] for name in ("both, None", "both, 60", "mlm, 60")}
    return cases, one_step(Communicator(), dtype, list(cases.values()))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_any_number_of_ranks_takes_the_same_step(size, dtype):
    cases, single = one_step_alone(dtype)
    ranks = run_group(size, one_step, dtype, list(cases.values()))
    within = ROUNDING[dtype]
    for number, name in enumerate(cases):
        losses, gradients, metrics, parameters, states, queue = single[number]
        assert max(g.abs().max() for g in gradients) > 0 or name.startswith("nothing")
        for results in ranks:
            its_losses, its_gradients, its_metrics, its_parameters, its_states, its_queue = results[number]
            assert deviation(its_losses, losses) < within, name
            assert deviation(its_gradients, gradients) < within, name
            if dtype == torch.float64:
                assert deviation(its_parameters.values(), parameters.values()) < within, name
                assert deviation(its_states, states) < within, name
                assert its_metrics.loss == pytest.approx(metrics.loss, rel=within), name
                assert its_metrics.grad_norm == pytest.approx(metrics.grad_norm, rel=within), name
                for count in ("num_tokens", "num_selected", "flops"):
                    assert getattr(its_metrics, count) == pytest.approx(getattr(metrics, count), rel=1e-12), name
                assert (queue is None) == (its_queue is None)
                assert queue is None or deviation([its_queue], [queue]) < within
        for results in ranks[1:]:
            assert all(torch.equal(a, results[number][3][key]) for key, a in ranks[0][number][3].items()), name


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
        for part, everything in zip(kept, single, strict=True):
            assert part < 0.52 * everything


def autocast(comm):
    train_step, batch = setup(comm, tokens=60, dtype=torch.float32, autocast=torch.bfloat16)
    train_step.gradients({"": batch}, 1)
    train_step.comm.all_reduce_gradients(list(train_step.encoder.parameters()))
    return [full_tensor(p.grad).clone() for p in train_step.encoder.parameters()]


def test_autocast_is_that_of_one_process_within_its_precision():
    expected = autocast(Communicator())
    for found in run_group(2, autocast):
        flat, other = (torch.cat([g.flatten() for g in gradients]) for gradients in (found, expected))
        assert found[0].dtype == torch.float32
        assert torch.cosine_similarity(flat, other, dim=0) > 0.99


def compiled(comm):
    train_step, batch = setup(comm, encoder={"dropout": 0.2, "compile": comm.size > 1})
    return [train_step.step({"": batch}, number).loss for number in (1, 2)], weights(train_step)


@pytest.mark.slow
def test_a_compiled_encoder_can_be_sharded():
    losses, parameters = compiled(Communicator())
    for its_losses, its_parameters in run_group(2, compiled):
        assert deviation(its_losses, losses) < 1e-10
        assert deviation(its_parameters.values(), parameters.values()) < 1e-10


def not_finite(comm):
    """One rank's share of one weight is not finite: every rank must stop alike, nothing may be updated."""
    messages = []
    for tokens in (None, 60):
        train_step, batch = setup(comm, tokens=tokens)
        train_step.step({"": batch}, 1)
        before = weights(train_step)
        norm = train_step.encoder.model.base_model.embeddings.LayerNorm.bias
        if comm.rank == 0:
            with torch.no_grad():
                norm.to_local()[0] = math.nan
        poisoned = moments(train_step)
        with pytest.raises(NonFiniteLossError) as stopped:
            train_step.step({"": batch}, 2)
        after = weights(train_step)
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        same_moments = all(torch.equal(a, b) for a, b in zip(poisoned, moments(train_step), strict=True))
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
    train_step, batch = setup(comm, OBJECTIVES["queue"], tokens=60, sharded=sharded and comm.size > 1, **given)
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
    steps(comm, folder / "again", 3, 4, half, **given)
    steps(comm, folder / "then unsharded", 3, 4, half, sharded=False, **given)
    unsharded = steps(comm, folder / "unsharded half", 1, 2, sharded=False, **given)
    steps(comm, folder / "then sharded", 3, 4, unsharded, **given)
    steps(comm, folder / "from one process", 3, 4, from_single, **given)


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
