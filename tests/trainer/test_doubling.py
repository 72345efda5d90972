"""All-reduces of integers by recursive doubling, and the exchanges of a step that use them."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from groups import run_group
from tiny import HALF, documents, rank_batch, tiny_collator, tiny_encoder, tiny_train_step, with_task

from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.parallel import doubling
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.parallel.request import Agreement, Request
from declutr.trainer.step.microbatch import Microbatch

pytestmark = pytest.mark.dist
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

    def all_reduce_counts(self, counts):
        self.names.append("counts")
        return super().all_reduce_counts(counts)

    def all_reduce_max(self, number):
        self.names.append("max")
        return super().all_reduce_max(number)

    def all_reduce_or(self, requests):
        self.names.append("or")
        return super().all_reduce_or(requests)


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


def test_step_has_two_exchanges_of_integers_that_carry_all_requests():
    for plain, fixed, first, second in run_group(2, steps):
        assert plain[0] == fixed[0] == ["counts", "or"]
        again = ["max", "max", "counts", "or"]  # of the smaller microbatch and the repeated step
        assert first[0] == ["counts", *again]
        assert second[0] == ["counts", "or", *again]
        assert {one[1] for one in (plain, fixed, first, second)} == {Request.STOP | Request.REPORT}
        assert first[2] == pytest.approx(plain[2])
        assert second[2] == pytest.approx(plain[2])
