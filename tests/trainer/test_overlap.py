"""Gradient sums that overlap the last backward, and all-reduces of integers by recursive doubling."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from groups import run_group
from measures import deviation
from tiny import HALF, documents, rank_batch, tiny_collator, tiny_encoder, tiny_train_step, with_task

from declutr.trainer.data.plan import Plan
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.parallel import doubling
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.parallel.overlap import BucketedReducer
from declutr.trainer.parallel.request import Agreement, Request
from declutr.trainer.step.microbatch import Microbatch
from declutr.trainer.step.nonfinite_losses import NonFiniteLossError

LENGTHS = [48, 70, 49, 131, 60]
DROPOUT = {"dropout": 0.2, "projection": {"kind": "mlp", "size": 6}}
CASES = {
    "one pass": {},
    "two passes": {"tokens": 60},
    "mlm alone": {"objective": {"terms": "mlm", "masking": HALF}, "tokens": 60},
    "contrastive alone": {"objective": {"terms": "contrastive"}},
    "more ranks than documents": {"lengths": LENGTHS[:1]},
    "one bucket": {"bytes": 2**30},
}


def setup(comm, overlap, objective=None, tokens=None, lengths=LENGTHS, bytes=4096, compressed=None):
    config = DeclutrConfig(**(objective or {"masking": HALF}))
    train_step = tiny_train_step(tiny_encoder(**DROPOUT), config, comm=comm, microbatch_tokens=tokens)
    if overlap:
        body = list(train_step.encoder.model.base_model.parameters())
        heads = [p for p in train_step.encoder.parameters() if id(p) not in {id(one) for one in body}]  # sent last
        sums = BucketedReducer(comm, [*heads, *body], compressed, bytes)
        train_step = with_task(train_step, overlap=sums)
    start, end = Plan(0, len(lengths), len(lengths)).slice(comm.rank, comm.size)
    return train_step, rank_batch(tiny_collator(config), documents(lengths, 12), start, end)


def sums_of(comm, overlap, case):
    """Gradients summed over ranks, parameters after two steps, and the buckets sent when the backward ended."""
    train_step, batch = setup(comm, overlap, **case)
    train_step._clear()
    train_step.gradients({"": batch}, 1)
    buckets = train_step.tasks[0].overlap.buckets if overlap else []
    sent = sum(bucket.work is not None for bucket in buckets), len(buckets)
    parameters = list(train_step.encoder.parameters())
    train_step._sum(parameters)
    gradients = [p.grad.clone() for p in parameters]
    for step in (1, 2):
        train_step.step({"": batch}, step)
    return gradients, [p.detach().clone() for p in parameters], sent


def both(comm):
    return {name: [sums_of(comm, overlap, case) for overlap in (False, True)] for name, case in CASES.items()}


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_those_after_the_backward(size):
    """With two workers even to the bit, because a + b = b + a."""
    ranks = run_group(size, both)
    for results in ranks:
        for name, (plain, overlapped) in results.items():
            assert max(g.abs().max() for g in plain[0]) > 0, name
            assert deviation(overlapped[0], plain[0]) < 1e-10, name
            assert deviation(overlapped[1], plain[1]) < 1e-10, name
            if size == 2:
                assert all(torch.equal(a, b) for a, b in zip(overlapped[1], plain[1], strict=True)), name
    for name in ("one pass", "two passes"):
        sent, buckets = ranks[0][name][1][2]
        assert 5 < buckets / 2 < sent <= buckets  # most are on their way when the backward ends


def compressed(comm):
    exact = sums_of(comm, False, {})[0]
    return exact, sums_of(comm, True, {"compressed": torch.bfloat16})[0]


@pytest.mark.dist
def test_compressed_sums_keep_three_digits():
    for exact, found in run_group(2, compressed):
        norm, apart = (
            torch.cat([each.flatten() for each in some]).norm()
            for some in (exact, [a - b for a, b in zip(exact, found, strict=True)])
        )
        assert apart < 2.0**-8 * norm
    assert deviation(found, exact) > 1e-6  # it is compressed


def failing(comm):
    """One rank runs out of memory once, in the first or the last backward of a step; both repeat the step."""
    results = []
    for at in (0, 1, 2):
        train_step, batch = setup(comm, True)
        train_step = with_task(train_step, microbatch=Microbatch(30, automatic=True))
        expected, _ = setup(comm, False)
        calls = iter(range(1000))
        embed = train_step.encoder.forward

        def forward(*arguments, at=at, calls=calls, embed=embed):
            if comm.rank == 1 and torch.is_grad_enabled() and next(calls) == at:
                raise torch.OutOfMemoryError("DefaultCPUAllocator: given to this test")
            return embed(*arguments)

        train_step.encoder.forward = forward
        train_step.step({"": batch}, 1)
        expected.step({"": batch}, 1)
        pairs = zip(train_step.encoder.parameters(), expected.encoder.parameters(), strict=True)
        tokens = train_step.tasks[0].microbatch.max_tokens
        results.append((tokens, max(float((a - b).abs().max().detach()) for a, b in pairs)))
    return results


@pytest.mark.dist
def test_a_step_that_ran_out_of_memory_is_repeated():
    for results in run_group(2, failing):
        for tokens, apart in results:
            assert tokens < 30
            assert apart < 1e-12


def not_finite(comm):
    train_step, batch = setup(comm, True)
    with torch.no_grad():
        train_step.encoder.projection[0].weight[0, 0] = torch.nan
    try:
        train_step.step({"": batch}, 1)
    except NonFiniteLossError:
        return True
    return False


@pytest.mark.dist
def test_a_bad_loss_ends_on_every_rank():
    assert run_group(2, not_finite) == [True, True]


RANKS = 6
LARGE = 2**62 + 1  # its bits are lost in a float


def own(rank):
    return torch.tensor([rank + 1, -rank, LARGE if rank == 0 else 0, 1 << rank])


def on_ranks(comm):
    """Sums, maxima and unions over the first 1, 2, ... ranks, and the number of exchanges of a step."""
    found = {}
    for size in range(1, comm.size + 1):
        dist.barrier()
        if comm.rank < size:
            for combine in (torch.add, torch.maximum, torch.bitwise_or):
                values = own(comm.rank)
                result = doubling.all_reduce(values, comm.rank, size, combine)
                assert torch.equal(values, own(comm.rank)), "the argument is unchanged"
                found[size, combine.__name__] = result.tolist()
    requests = Request.SAVE if comm.rank == 1 else Request.STOP if comm.rank == 4 else Request(0)
    return found, comm.all_reduce_max(-comm.rank), comm.all_reduce_counts([comm.rank, 1]), comm.all_reduce_or(requests)


@pytest.mark.dist
def test_doubling_any_number_of_ranks_gives_the_result_of_one_process():
    results = run_group(RANKS, on_ranks)
    for size in range(1, RANKS + 1):
        for combine in (torch.add, torch.maximum, torch.bitwise_or):
            expected = own(0)
            for rank in range(1, size):
                expected = combine(expected, own(rank))
            for found, *_ in results[:size]:
                assert found[size, combine.__name__] == expected.tolist()
    for _, largest, counts, union in results:
        assert (largest, counts, union) == (0, [15, 6], Request.SAVE | Request.STOP)


@dataclass(frozen=True)
class Recorded(Communicator):
    """Workers whose exchanges of integers are listed."""

    names: list[str] = field(default_factory=list)

    def __getattribute__(self, name):
        if name in ("all_reduce_counts", "all_reduce_max", "all_reduce_or"):
            self.names.append(name.rpartition("_")[2])
        return super().__getattribute__(name)


def exchanges_of(comm, automatic, fails_at):
    """Exchanges of integers in a step, the requests agreed on, the loss; rank 1 runs out of memory once."""
    comm, config = Recorded(comm.rank, comm.size), DeclutrConfig(masking=HALF)
    train_step = tiny_train_step(tiny_encoder(), config, comm=comm)
    train_step = with_task(train_step, microbatch=Microbatch(40, automatic=automatic))
    batch = rank_batch(tiny_collator(config), documents([60, 70], 12), comm.rank, comm.rank + 1)
    embed, left = train_step.encoder.forward, [fails_at]

    def forward(*given):
        if comm.rank == 1 and left[0] == ("second pass" if torch.is_grad_enabled() else "first pass"):
            left[0] = ""
            raise torch.OutOfMemoryError("DefaultCPUAllocator: given to this test")
        return embed(*given)

    train_step.encoder.forward = forward
    agreement = Agreement(lambda: Request.REPORT if comm.rank else Request.STOP)
    loss = train_step.begin({"": batch}, 1, agreement).read().loss
    return list(comm.names), agreement.agreed, loss


def steps(comm):
    cases = ((True, ""), (False, ""), (True, "first pass"), (True, "second pass"))
    return [exchanges_of(comm, *case) for case in cases]


@pytest.mark.dist
def test_step_has_two_exchanges_of_integers_that_carry_all_requests():
    for plain, fixed, first, second in run_group(2, steps):
        assert plain[0] == fixed[0] == ["counts", "or"]
        again = ["max", "max", "counts", "or"]  # of the smaller microbatch and the repeated step
        assert first[0] == ["counts", *again]
        assert second[0] == ["counts", "or", *again]
        assert {one[1] for one in (plain, fixed, first, second)} == {Request.STOP | Request.REPORT}
        assert first[2] == pytest.approx(plain[2])
        assert second[2] == pytest.approx(plain[2])
