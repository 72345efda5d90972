"""Sharded parameters: loss, gradient, update, scores and checkpoints are those of one process that holds everything."""

import functools
import math

import pytest
import torch
from groups import run_group
from measures import deviation
from safetensors.torch import load_file
from tiny import documents, rank_batch, tiny_encoder, tiny_feed, tiny_stepper
from torch.distributed.tensor import DTensor

from trainer.checkpoints import checkpoint
from trainer.checkpoints.state import RunState
from trainer.checkpoints.weights import collect, load
from trainer.data.plan import Plan
from trainer.model.freezing import frozen_parameters
from trainer.objectives.declutr.config import DeclutrConfig
from trainer.parallel.sharding import whole
from trainer.parallel.world import World
from trainer.step.settings import OptimConfig
from trainer.step.step import NonFiniteLossError

pytestmark = pytest.mark.dist
LENGTHS = [48, 70, 49, 131, 60]
HALF = {"mlm_probability": 0.5}
BOTH = {"masking": HALF}
OBJECTIVES = {
    "both": BOTH,
    "mlm": {"terms": "mlm", "masking": HALF},
    "contrastive": {"terms": "contrastive"},
    "queue": {"masking": HALF, "queue_size": 13},
    "nothing selected": {"masking": {"mlm_probability": 0.0}},
}
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


def setup(world, objective=BOTH, lengths=LENGTHS, tokens=None, encoder=DROPOUT, family="roberta", optim=None, **given):
    """A stepper, sharded where there are several ranks, and this rank's share of a batch."""
    config = DeclutrConfig(**objective)
    optim = OptimConfig(**{"lr": 1e-2, "bias_correction": False, **(optim or {})})
    model = tiny_encoder(family, given.pop("dtype", torch.float64), **encoder)
    frozen = given.pop("frozen", None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or not name.startswith(frozen))
    for parameter in frozen_parameters(model.model, model.config.num_trainable_layers):
        parameter.requires_grad_(False)
    made = {"world": world, "microbatch_tokens": tokens, "optim": optim, "sharded": world.size > 1, **given}
    stepper = tiny_stepper(model, config, **made)
    start, end = Plan(0, len(lengths), len(lengths)).slice(world.rank, world.size)
    return stepper, rank_batch(tiny_feed(config), documents(lengths, 12), start, end)


def weights(stepper):
    return {name: whole(p.detach()).clone() for name, p in stepper.encoder.named_parameters()}


def moments(stepper):
    named = stepper.encoder.named_parameters()
    return [whole(v).clone() for _, p in named for key, v in stepper.optimizer.state[p].items() if key != "step"]


def one_step(world, dtype, cases):
    """Loss and gradient of a batch; after a step metrics, weights and moments."""
    results = []
    for case in cases:
        stepper, batch = setup(world, dtype=dtype, **case)
        found = stepper.gradients(batch, 1)
        parameters = [p for p in stepper.encoder.parameters() if p.requires_grad]
        assert all(isinstance(p, DTensor) == (world.size > 1) for p in stepper.encoder.parameters())
        stepper.world.sum_gradients(parameters)
        gradients = [whole(p.grad).clone() for p in parameters]
        losses = [found.terms.get("contrastive", torch.zeros(())).item(), world.sum(found.mlm_sum).item()]
        metrics = stepper.step(batch, 1)
        results.append((losses, gradients, metrics, weights(stepper), moments(stepper), stepper.objective.queue))
    return results


@functools.cache
def one_step_alone(dtype):
    """Cases by name, and what one process comes to."""
    # in float32 moments of entries that are zero but for rounding are noise: fewer cases, the gradient only
    cases = CASES if dtype == torch.float64 else {name: CASES[name] for name in ("both, None", "both, 60", "mlm, 60")}
    return cases, one_step(World(), dtype, list(cases.values()))


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


def held(world):
    """Bytes of parameters, gradients and moments that this rank keeps between two steps."""
    stepper, batch = setup(world, tokens=60)
    stepper.step(batch, 1)

    parameters = list(stepper.encoder.parameters())
    states = [value for p in parameters for value in stepper.optimizer.state[p].values()]
    return [held_bytes(tensors) for tensors in (parameters, [p.grad for p in parameters], states)]


def held_bytes(tensors):
    """Bytes of the memory behind tensors, each piece counted once."""
    local = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in local}.values())


def test_a_rank_keeps_its_part_alone():
    single = held(World())
    for kept in run_group(2, held):
        for part, everything in zip(kept, single, strict=True):
            assert part < 0.52 * everything


def autocast(world):
    stepper, batch = setup(world, tokens=60, dtype=torch.float32, autocast=torch.bfloat16)
    stepper.gradients(batch, 1)
    stepper.world.sum_gradients(list(stepper.encoder.parameters()))
    return [whole(p.grad).clone() for p in stepper.encoder.parameters()]


def test_autocast_is_that_of_one_process_within_its_precision():
    expected = autocast(World())
    for found in run_group(2, autocast):
        flat, other = (torch.cat([g.flatten() for g in gradients]) for gradients in (found, expected))
        assert found[0].dtype == torch.float32
        assert torch.cosine_similarity(flat, other, dim=0) > 0.99


def compiled(world):
    stepper, batch = setup(world, encoder={"dropout": 0.2, "compile": world.size > 1})
    return [stepper.step(batch, number).loss for number in (1, 2)], weights(stepper)


@pytest.mark.slow
def test_a_compiled_encoder_can_be_sharded():
    losses, parameters = compiled(World())
    for its_losses, its_parameters in run_group(2, compiled):
        assert deviation(its_losses, losses) < 1e-10
        assert deviation(its_parameters.values(), parameters.values()) < 1e-10


def not_finite(world):
    """One rank's share of one weight is not finite: every rank must stop alike, nothing may be updated."""
    messages = []
    for tokens in (None, 60):
        stepper, batch = setup(world, tokens=tokens)
        stepper.step(batch, 1)
        before = weights(stepper)
        norm = stepper.encoder.model.base_model.embeddings.LayerNorm.bias
        if world.rank == 0:
            with torch.no_grad():
                norm.to_local()[0] = math.nan
        poisoned = moments(stepper)
        with pytest.raises(NonFiniteLossError) as stopped:
            stepper.step(batch, 2)
        after = weights(stepper)
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        same_moments = all(torch.equal(a, b) for a, b in zip(poisoned, moments(stepper), strict=True))
        messages.append((str(stopped.value), changed, same_moments))
    return messages


def test_a_loss_that_is_not_finite_stops_every_rank():
    for results in run_group(3, not_finite):
        for message, changed, same_moments in results:
            assert message.startswith("step 2: loss nan")
            assert changed == ["model.roberta.embeddings.LayerNorm.bias"]
            assert same_moments


def steps(world, folder, first, last, start=None, sharded=True, **given):
    """Takes the steps first..last, from a checkpoint where there is one, and writes a checkpoint after the last."""
    stepper, batch = setup(world, OBJECTIVES["queue"], tokens=60, sharded=sharded and world.size > 1, **given)
    parts = stepper.encoder, stepper.optimizer, stepper.objective
    if start is not None:
        load(start, *parts)
    for number in range(first, last + 1):
        stepper.step(batch, number)
    contents = collect(*parts, keep=world.rank == 0)
    assert all(contents.values()) == (world.rank == 0)
    if world.rank == 0:
        done = {"step": last, "documents": 5 * last, "world_size": world.size}
        checkpoint.save(folder, RunState(**done, config_hash="c", data_hash="d", scores={}, files={}), contents)
    world.largest(0)  # nobody reads before it is written
    return checkpoint.checkpoint_path(folder, last)


def whole_and_cut(world, folder, from_single, given):
    """Four steps at once, and four steps with a change of everything in the middle, by several ranks."""
    steps(world, folder / "whole", 1, 4, **given)
    half = steps(world, folder / "half", 1, 2, **given)
    steps(world, folder / "again", 3, 4, half, **given)
    steps(world, folder / "then unsharded", 3, 4, half, sharded=False, **given)
    unsharded = steps(world, folder / "unsharded half", 1, 2, sharded=False, **given)
    steps(world, folder / "then sharded", 3, 4, unsharded, **given)
    steps(world, folder / "from one process", 3, 4, from_single, **given)


def tensors(path):
    return {f"{f.name}:{key}": t for f in sorted(path.glob("*.safetensors")) for key, t in load_file(f).items()}


@pytest.mark.parametrize("correction", [True, False], ids=["AdamW", "released AdamW"])
def test_checkpoints_are_those_of_an_unsharded_run(tmp_path, correction):
    """A sharded run goes on to the bit; sharded, unsharded and single runs go on from each other's checkpoints."""
    given = {"optim": {"bias_correction": correction}}
    from_single = steps(World(), tmp_path / "single half", 1, 2, **given)
    single = tensors(steps(World(), tmp_path / "single", 1, 4, **given))
    run_group(3, whole_and_cut, tmp_path, from_single, given)
    half = checkpoint.checkpoint_path(tmp_path / "half", 2)
    assert checkpoint.read_state(half).world_size == 3
    steps(World(), tmp_path / "to one process", 3, 4, half, **given)
    whole_run, again = (tensors(checkpoint.checkpoint_path(tmp_path / name, 4)) for name in ("whole", "again"))
    assert whole_run.keys() == again.keys() == single.keys()
    assert all(torch.equal(tensor, again[key]) for key, tensor in whole_run.items())
    for name in ("whole", "then unsharded", "then sharded", "from one process", "to one process"):
        found = tensors(checkpoint.checkpoint_path(tmp_path / name, 4))
        assert {key: t.dtype for key, t in found.items()} == {key: t.dtype for key, t in single.items()}, name
        assert deviation([found[key] for key in single], single.values()) < 1e-10, name
