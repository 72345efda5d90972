"""`scaling.elastic_determinism`: any number of workers takes the same steps to the bit."""

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from groups import run_group
from measures import deviation
from tiny import HALF, documents, rank_batch, tiny_collator, tiny_encoder, tiny_train_step, with_task
from tinyruns import least_config

from declutr.trainer.data.batches import canonical_microbatches, collated
from declutr.trainer.data.plan import Plan
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.parallel.reducers import SCALE, FixedPointReducer
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.optim import build_optimizer
from declutr.trainer.step.step import NonFiniteLossError

LENGTHS = [48, 70, 49, 131, 60, 99, 52, 77, 64]
DROPOUT = {"dropout": 0.2, "attention_dropout": 0.2, "projection": {"kind": "mlp", "size": 6}}
CASES = {
    "both": {},
    "two documents a unit": {"unit": 2},
    "second pass": {"tokens": 20},
    "mlm alone": {"objective": {"terms": "mlm", "masking": HALF}},
    "mlm alone, second pass": {"objective": {"terms": "mlm", "masking": HALF}, "tokens": 20},
    "contrastive alone": {"objective": {"terms": "contrastive"}},
    "queue": {"objective": {"masking": HALF, "queue_size": 13}},
    "padded": {"encoder": {**DROPOUT, "layout": "padded"}},
    "checkpointed": {"encoder": {**DROPOUT, "activation_checkpointing": True}},
    "bert": {"family": "bert"},
}


def train_step_of(comm, objective=None, encoder=DROPOUT, family="roberta", tokens=None, dtype=torch.float32):
    config = DeclutrConfig(**(objective or {"masking": HALF}))
    comm = dataclasses.replace(comm, deterministic=True)
    optim = OptimConfig(lr=1e-2, bias_correction=False, max_grad_norm=0.1)
    made = {"comm": comm, "microbatch_tokens": tokens, "optim": optim}
    made = tiny_train_step(tiny_encoder(family, dtype, **encoder), config, **made)
    optimizer = build_optimizer(optim, made.encoder, made.tasks[0].objective)
    reducer = FixedPointReducer(comm, [p for group in optimizer.param_groups for p in group["params"]], 99)
    made = with_task(made, reducer=reducer)
    return dataclasses.replace(made, optimizer=optimizer), tiny_collator(config)


def batch_of(collator, comm, step, unit=1, lengths=LENGTHS):
    table = documents(lengths, 12)
    start, end = Plan(0, len(lengths), len(lengths), unit).slice(comm.rank, comm.size)
    return collated(collator, table.slice(start, end - start), np.full(end - start, step), start, unit)


def checksum(parameters):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in parameters)).hexdigest()


def trained(comm, cases, steps=3):
    """Checksum of the parameters and the lines of the steps, by case."""
    found = {}
    for name, case in cases.items():
        unit = case.get("unit", 1)
        train_step, collator = train_step_of(comm, **{key: value for key, value in case.items() if key != "unit"})
        lines = []
        for step in range(1, steps + 1):
            batch = batch_of(collator, comm, step, unit)
            batch = dataclasses.replace(batch, digest=batch.spans.digest())
            lines.append(train_step.step({"": batch}, step).line())
        found[name] = checksum(train_step.encoder.parameters()), lines
    return found


@pytest.fixture(scope="module")
def alone():
    return trained(Communicator(), CASES)


@pytest.mark.dist
@pytest.mark.parametrize("size", [3, pytest.param(7, marks=pytest.mark.nightly)])
def test_any_number_of_workers_has_the_same_bits(alone, size):
    """With units of two documents, seven workers have five units: two workers have none."""
    assert len({one[0] for one in alone.values()}) == len(CASES) - 3  # a second forward changes no bit
    assert alone["both"] == alone["second pass"] == alone["checkpointed"]
    assert alone["mlm alone"] == alone["mlm alone, second pass"]
    for results in run_group(size, trained, CASES):
        for name, (found, lines) in results.items():
            assert lines == alone[name][1], name
            assert found == alone[name][0], name


def gradients(train_step, batch):
    train_step._clear()
    train_step.gradients({"": batch}, 1)
    train_step._sum([p for group in train_step.optimizer.param_groups for p in group["params"]])
    return [p.grad.clone() for p in train_step.encoder.parameters()]


@pytest.mark.parametrize("unit", [1, 2, 9])
def test_gradient_is_that_of_the_whole_batch(unit):
    train_step, collator = train_step_of(Communicator(), dtype=torch.float64)
    plain = tiny_train_step(tiny_encoder("roberta", torch.float64, **DROPOUT), DeclutrConfig(masking=HALF))
    plain.optimizer.zero_grad()
    whole = rank_batch(collator, documents(LENGTHS, 12))
    plain.gradients({"": whole}, 1)
    batch = batch_of(collator, Communicator(), 0, unit)
    assert batch.spans.digest() == whole.spans.digest()
    rows = [part.num_rows for part in canonical_microbatches(batch)]  # two of each document
    assert rows == [2 * unit] * (9 // unit) + ([2] if unit == 2 else [])
    found = gradients(train_step, batch)
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain.encoder.parameters()]
    assert max((a - b).abs().max() for a, b in zip(found, expected, strict=True)) <= 10 / SCALE
    assert deviation(found, expected) < 1e-10


def test_units_have_their_numbers_in_the_global_batch():
    """By which the dropout of attention weights in the padded layout is keyed on any worker."""
    collator, table = train_step_of(Communicator())[1], documents(LENGTHS, 12)
    batch = collated(collator, table.slice(4, 5), np.zeros(5, np.int64), 4, 2)
    assert [unit.number for unit in batch.canonical] == [2, 3, 4]
    assert [unit.num_rows for unit in batch.canonical] == [4, 4, 2]  # two of each document


def test_a_gradient_that_could_overflow_is_found():
    """The limit is of each term; the message names it, and nothing is updated."""
    train_step, collator = train_step_of(Communicator())
    before = checksum(train_step.encoder.parameters())
    train_step.tasks[0].reducer.limit = 1e-6
    with pytest.raises(NonFiniteLossError, match="nothing was updated"):
        train_step.step({"": batch_of(collator, Communicator(), 1)}, 1)
    assert checksum(train_step.encoder.parameters()) == before
    train_step.tasks[0].reducer.limit = 2.0**12
    train_step.step({"": batch_of(collator, Communicator(), 1)}, 1)
    assert checksum(train_step.encoder.parameters()) != before


def summed(terms, num_terms):
    """The sum of these gradients in fixed point, and whether all were within the limit."""
    parameter = torch.nn.Parameter(torch.zeros_like(terms[0]))
    reducer = FixedPointReducer(Communicator(), [parameter], num_terms)
    reducer.begin()
    for term in terms:
        (parameter * term).sum().backward()
    return reducer.finish(), parameter.grad


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 2.0**40, -(2.0**40)])
def test_terms_beyond_the_limit_are_refused(value):
    within, found = summed([torch.tensor([1.0, 2, 3, 4, 5]), torch.tensor([0.0, value, 0, 0, 0])], 3)
    assert not within
    assert found.isnan().all()


def test_sums_below_the_limit_are_exact_and_terms_are_rounded_to_the_nearest_multiple():
    """As many terms as allowed, each just below the limit, do not overflow."""
    limit = FixedPointReducer(Communicator(), [torch.nn.Parameter(torch.zeros(1))], 3).limit
    term = torch.full((4,), limit).nextafter(torch.tensor(0.0))
    within, found = summed([term] * 3, 3)
    assert within
    assert torch.equal(found, (3 * term.double()).float())
    within, found = summed([torch.tensor([0.6, 1.4, -0.6, -1.4]) / SCALE] * 3, 3)
    assert within
    assert (found * SCALE).tolist() == [3, 3, -3, -3]


def test_a_term_at_the_limit_is_refused_and_gradients_outside_a_step_are_plain():
    parameter = torch.nn.Parameter(torch.zeros(4))
    reducer = FixedPointReducer(Communicator(), [parameter], 2)
    for value, allowed in ((2.0**18, False), (2.0**17, True)):
        reducer.begin()
        (parameter * value).sum().backward()
        assert reducer.finish() == allowed
        parameter.grad = None
        (parameter * value).sum().backward()
        assert parameter.grad.tolist() == [value] * 4
        parameter.grad = None


def test_order_of_terms_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    terms = [
        torch.randn(1000, generator=generator) * 10.0 ** (4 * torch.rand(1, generator=generator) - 3) for _ in range(20)
    ]
    (within, found), *others = (summed(some, 20) for some in (terms, terms[::-1], terms[7:] + terms[:7]))
    assert within
    assert all(other[0] and torch.equal(found, other[1]) for other in others)
    assert torch.allclose(found, torch.stack(terms).double().sum(0).float(), rtol=1e-6)


def test_units_of_a_batch():
    assert least_config().main.canonical_documents is None
    for size, unit, number in [(1, 1, 1), (16, 1, 16), (17, 2, 9), (100, 7, 15)]:
        config = least_config(batch_documents=size, scaling={"elastic_determinism": True})
        assert (config.main.canonical_documents, config.main.num_canonical) == (unit, number)
        for comm in (1, 2, 5, 16):
            bounds = [Plan(0, 100, size, unit).slice(rank, comm) for rank in range(comm)]
            assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
            assert bounds[-1][1] == size
            assert all(start % unit == 0 for start, _ in bounds if start < size)


def test_the_rows_of_a_rank_are_whole_chunks_if_bits_must_not_depend_on_it():
    for deterministic, parts in ((True, [(0, 4), (4, 10)]), (False, [(0, 5), (5, 10)])):
        ranks = [dataclasses.replace(Communicator(), rank=rank, size=2, deterministic=deterministic) for rank in (0, 1)]
        assert [rank.row_range(10, 4) for rank in ranks] == parts


def test_large_parameters_are_summed_to_their_last_element():
    """Elements are converted a million at a time, and sent 16 millions at a time."""
    sizes = [3, 2**20 + 5, 2**21, 7]
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    reducer = FixedPointReducer(Communicator(), parameters, 2)
    reducer.begin()
    terms = [torch.arange(1, size + 1) / 2.0**22 for size in sizes]
    for _ in range(2):
        sum((p * term).sum() for p, term in zip(parameters, terms, strict=True)).backward()
    assert reducer.finish()
    assert all(torch.equal(p.grad, 2 * term) for p, term in zip(parameters, terms, strict=True))


@pytest.mark.parametrize("num_terms", [1, 3, 1000])
def test_the_limit_is_the_largest_that_cannot_overflow(num_terms):
    """In integers: that many terms at the limit are 2^63, the first number that 64 bits cannot hold."""
    limit = FixedPointReducer(Communicator(), [torch.nn.Parameter(torch.zeros(1))], num_terms).limit
    assert limit * num_terms * SCALE == pytest.approx(2.0**63, rel=1e-12)
