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
    config, comm = DeclutrConfig(**(objective or {"masking": HALF})), dataclasses.replace(comm, deterministic=True)
    optim = OptimConfig(lr=1e-2, bias_correction=False, max_grad_norm=0.1)
    encoder = tiny_encoder(family, dtype, **encoder)
    train_step = tiny_train_step(encoder, config, comm=comm, microbatch_tokens=tokens, optim=optim)
    optimizer = build_optimizer(optim, encoder, train_step.tasks[0].objective)
    train_step = dataclasses.replace(train_step, optimizer=optimizer)
    return with_task(train_step, reducer=FixedPointReducer(comm, trained(train_step), 99)), tiny_collator(config)


def trained(train_step):
    return [p for group in train_step.optimizer.param_groups for p in group["params"]]


def batch_of(collator, comm, step, unit=1):
    start, end = Plan(0, len(LENGTHS), len(LENGTHS), unit).slice(comm.rank, comm.size)
    rows = documents(LENGTHS, 12).slice(start, end - start)
    return collated(collator, rows, np.full(end - start, step), start, unit)


def checksum(parameters):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in parameters)).hexdigest()


def results(comm, cases):
    """Checksum of the parameters after three steps and the lines of the steps, by case."""
    by_case = {}
    for name, case in cases.items():
        train_step, collator = train_step_of(comm, **{key: value for key, value in case.items() if key != "unit"})
        lines = []
        for step in (1, 2, 3):
            batch = batch_of(collator, comm, step, case.get("unit", 1))
            batch = dataclasses.replace(batch, digest=batch.spans.digest())
            lines.append(train_step.step({"": batch}, step).line())
        by_case[name] = checksum(train_step.encoder.parameters()), lines
    return by_case


@pytest.mark.dist
@pytest.mark.parametrize("size", [3, pytest.param(7, marks=pytest.mark.nightly)])
def test_any_number_of_workers_has_the_same_bits(size):
    """With units of two documents, seven workers have five units: two workers have none."""
    alone = results(Communicator(), CASES)
    assert len({bits for bits, _ in alone.values()}) == len(CASES) - 3  # a second forward changes no bit
    assert alone["both"] == alone["second pass"] == alone["checkpointed"]
    assert alone["mlm alone"] == alone["mlm alone, second pass"]
    for by_case in run_group(size, results, CASES):
        for name, (bits, lines) in by_case.items():
            assert lines == alone[name][1], name
            assert bits == alone[name][0], name


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
    train_step._clear()
    train_step.gradients({"": batch}, 1)
    train_step._sum(trained(train_step))
    gradients = [p.grad for p in train_step.encoder.parameters()]
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain.encoder.parameters()]
    assert max((a - b).abs().max() for a, b in zip(gradients, expected, strict=True)) <= 10 / SCALE
    assert deviation(gradients, expected) < 1e-10


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


def reducer_of(num_terms, *sizes):
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    return FixedPointReducer(Communicator(), parameters, num_terms), parameters


def summed(terms, num_terms):
    """The sum of these gradients in fixed point, and whether all were within the limit."""
    reducer, [parameter] = reducer_of(num_terms, len(terms[0]))
    reducer.begin()
    for term in terms:
        (parameter * term).sum().backward()
    return reducer.finish(), parameter.grad


def test_terms_at_and_beyond_the_limit_are_refused_and_gradients_outside_a_step_are_plain():
    for value in (float("inf"), float("nan"), 2.0**40, -(2.0**40)):
        within, total = summed([torch.tensor([1.0, 2, 3, 4, 5]), torch.tensor([0.0, value, 0, 0, 0])], 3)
        assert not within
        assert total.isnan().all()
    reducer, [parameter] = reducer_of(2, 4)
    for value, allowed in ((2.0**18, False), (2.0**17, True)):
        reducer.begin()
        (parameter * value).sum().backward()
        assert reducer.finish() == allowed
        parameter.grad = None
        (parameter * value).sum().backward()
        assert parameter.grad.tolist() == [value] * 4
        parameter.grad = None


def test_the_limit_is_the_largest_that_cannot_overflow_and_sums_below_it_are_exact():
    """In integers: that many terms at the limit are 2^63, the first number that 64 bits cannot hold."""
    for num_terms in (1, 3, 1000):
        assert reducer_of(num_terms, 1)[0].limit * num_terms * SCALE == pytest.approx(2.0**63, rel=1e-12)
    term = torch.full((4,), reducer_of(3, 1)[0].limit).nextafter(torch.tensor(0.0))
    within, total = summed([term] * 3, 3)
    assert within
    assert torch.equal(total, (3 * term.double()).float())
    within, total = summed([torch.tensor([0.6, 1.4, -0.6, -1.4]) / SCALE] * 3, 3)  # rounded to the nearest multiple
    assert within
    assert (total * SCALE).tolist() == [3, 3, -3, -3]


def test_order_of_terms_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    scales = 10.0 ** (4 * torch.rand(20, generator=generator) - 3)
    terms = [scale * torch.randn(1000, generator=generator) for scale in scales]
    (within, total), *again = (summed(order, 20) for order in (terms, terms[::-1], terms[7:] + terms[:7]))
    assert within
    assert all(inside and torch.equal(total, other) for inside, other in again)
    assert torch.allclose(total, torch.stack(terms).double().sum(0).float(), rtol=1e-6)


def test_units_of_a_batch():
    assert least_config().main.canonical_documents is None
    for size, unit, number in [(1, 1, 1), (16, 1, 16), (17, 2, 9), (100, 7, 15)]:
        config = least_config(batch_documents=size, scaling={"elastic_determinism": True})
        assert (config.main.canonical_documents, config.main.num_canonical) == (unit, number)
        for workers in (1, 2, 5, 16):
            bounds = [Plan(0, 100, size, unit).slice(rank, workers) for rank in range(workers)]
            assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
            assert bounds[-1][1] == size
            assert all(start % unit == 0 for start, _ in bounds if start < size)
    collator = tiny_collator(DeclutrConfig(masking=HALF))
    batch = collated(collator, documents(LENGTHS, 12).slice(4, 5), np.zeros(5, np.int64), 4, 2)
    assert [(part.number, part.num_rows) for part in batch.canonical] == [(2, 4), (3, 4), (4, 2)], "of the global batch"
    for deterministic, parts in ((True, [(0, 4), (4, 10)]), (False, [(0, 5), (5, 10)])):
        ranks = [dataclasses.replace(Communicator(), rank=rank, size=2, deterministic=deterministic) for rank in (0, 1)]
        assert [rank.row_range(10, 4) for rank in ranks] == parts, "whole chunks if bits must not depend on the rank"


def test_large_parameters_are_summed_to_their_last_element():
    """Elements are converted a million at a time, and sent 16 millions at a time."""
    sizes = [3, 2**20 + 5, 2**21, 7]
    reducer, parameters = reducer_of(2, *sizes)
    reducer.begin()
    terms = [torch.arange(1, size + 1) / 2.0**22 for size in sizes]
    for _ in range(2):
        sum((p * term).sum() for p, term in zip(parameters, terms, strict=True)).backward()
    assert reducer.finish()
    assert all(torch.equal(p.grad, 2 * term) for p, term in zip(parameters, terms, strict=True))
