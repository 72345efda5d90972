"""Updates: metrics read after them, microbatches that fit, sums beside the backward, exchanges of a step."""

import copy
import dataclasses
import functools
import json
import math
import sys
from dataclasses import dataclass, field

import pytest
import tiny
import torch
import torch.distributed as dist
from groups import run_group
from loops import same
from measures import deviation
from messages import all_of
from processes import run_python
from tiny import documents, rank_batch, tiny_collator, tiny_encoder, tiny_train_step, with_task

from declutr.trainer.checkpoints.weights import collect
from declutr.trainer.data.plan import Plan
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.parallel.communicator import Agreement, Communicator, Request, reduce_by_doubling
from declutr.trainer.parallel.reducers import BucketedReducer
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.gradcache import Microbatch, MicrobatchError, out_of_memory
from declutr.trainer.step.optim import build_optimizer
from declutr.trainer.step.step import NonFiniteLossError, NonFiniteLosses
from declutr.trainer.worker.loop import begin, read


def train_step(late, corrected=False):
    encoder, optim = tiny_encoder(dtype=torch.float32), OptimConfig(lr=1e-2, bias_correction=corrected)
    return tiny_train_step(encoder, optim=optim, optimizer=build_optimizer(optim, encoder, fused=True), late=late)


def batch(number=0):
    return rank_batch(tiny_collator(seed=number), documents([48, 70, 49], 12, seed=number))


def parameters(one):
    return [parameter.detach().clone() for parameter in one.encoder.parameters()]


@pytest.mark.parametrize("corrected", [False, True])
def test_late_metrics_leave_the_steps_the_same(corrected):
    early, late = train_step(False, corrected), train_step(True, corrected)
    expected = [early.step({"": batch(number)}, number).line() for number in (1, 2, 3)]
    pending = [late.begin({"": batch(number)}, number) for number in (1, 2, 3)]
    assert [update.read().line() for update in pending] == expected
    assert all(torch.equal(*pair) for pair in zip(parameters(early), parameters(late), strict=True))


@pytest.mark.parametrize("corrected", [False, True])
def test_a_bad_loss_changes_nothing(corrected):
    """Neither parameters nor moments; the next good step continues as if the bad one had not been."""
    bad, good = (train_step(True, corrected) for _ in range(2))
    for stepped in (bad, good):
        stepped.step({"": batch(1)}, 1)
    embeddings, before = bad.encoder.model.get_input_embeddings().weight, copy.deepcopy(collect([bad]))
    hook = embeddings.register_hook(lambda gradient: gradient * math.nan)
    pending = bad.begin({"": batch(2)}, 2)
    hook.remove()
    assert all(same(tensors, before[file]) for file, tensors in collect([bad]).items())
    with pytest.raises(NonFiniteLossError, match="nothing was updated"):
        pending.read()
    for stepped in (bad, good):
        stepped.step({"": batch(3)}, 3)
    assert same(collect([bad])["encoder.safetensors"], collect([good])["encoder.safetensors"])


def test_skipped_steps_are_counted_when_they_are_read():
    one = dataclasses.replace(train_step(True), nonfinite_losses=NonFiniteLosses(skip=True, most_in_a_row=1))
    one.encoder.model.get_input_embeddings().weight.register_hook(lambda gradient: gradient * math.nan)
    first, second = begin([one], {"": batch(1)}, 1), begin([one], {"": batch(2)}, 2)
    assert one.nonfinite_losses.skipped == 0
    assert read(first).skipped
    assert one.nonfinite_losses.skipped == 1
    with pytest.raises(NonFiniteLossError, match="max_skipped_steps = 1"):
        read(second)


def test_failed_allocation_of_a_library_is_recognised():
    for message in (
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error in: ../NCCLUtils.hpp:275, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory",
    ):
        assert out_of_memory(RuntimeError(message)), message
    assert not out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


# A process of its own, because the limit on its memory cannot be taken back.
SCRIPT = """
import json, resource, sys
import torch
from tiny import documents, rank_batch, tiny_encoder, tiny_collator, tiny_train_step
from declutr.trainer.step.gradcache import Microbatch

torch.set_num_threads(1)
shape = {"hidden_size": 64, "intermediate_size": 8192}
def gradient(microbatch):
    train_step = tiny_train_step(tiny_encoder(from_config=shape, dropout=0.1))
    train_step.tasks[0].microbatch.max_tokens, train_step.tasks[0].microbatch.automatic = microbatch
    batch = rank_batch(tiny_collator(), documents([200] * 16, 12))
    train_step.gradients({"": batch}, 1)
    grads = torch.cat([p.grad.flatten() for p in train_step.encoder.parameters() if p.grad is not None])
    return grads, train_step.tasks[0].microbatch.max_tokens, batch.spans.num_tokens

expected, _, tokens = gradient((500, False))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]) * 2**20, resource.RLIM_INFINITY))
found, limit, _ = gradient((None, True))
worst = float((found - expected).abs().max() / expected.abs().max())
print(json.dumps({"worst": worst, "limit": limit, "tokens": tokens}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits its own memory through Linux's RLIMIT_AS and /proc")
def test_a_step_that_runs_out_of_memory_is_taken_again_in_smaller_pieces():
    found = json.loads(run_python("-c", SCRIPT, "100", timeout=240).stdout.splitlines()[-1])
    assert found["limit"] < found["tokens"]  # the whole share did not fit
    assert found["worst"] < 1e-10


def test_microbatch_settings_choose_the_size_and_lowering_halves_it():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert Microbatch.of(None, cpu) == Microbatch(None, automatic=False)
    assert Microbatch.of(77, gpu) == Microbatch(77, automatic=False)
    assert Microbatch.of("auto", gpu) == Microbatch(None, automatic=True)
    assert Microbatch.of("auto", cpu).max_tokens == 8192
    spans, microbatch = tiny.random_spans([6, 20, 9]), Microbatch(None, automatic=True)
    microbatch.lower(spans, Communicator())
    assert microbatch.max_tokens == 20
    with pytest.raises(MicrobatchError, match=all_of("one span", "20 tokens")):
        microbatch.lower(spans, Communicator())


LENGTHS = [48, 70, 49, 131, 60]
DROPOUT = {"dropout": 0.2, "projection": {"kind": "mlp", "size": 6}}
CASES = {
    "one pass": {},
    "two passes": {"tokens": 60},
    "mlm alone": {"objective": {"terms": "mlm", "masking": tiny.HALF}, "tokens": 60},
    "contrastive alone": {"objective": {"terms": "contrastive"}},
    "more ranks than documents": {"lengths": LENGTHS[:1]},
    "one bucket": {"bytes": 2**30},
}


def setup(comm, overlap, objective=None, tokens=None, lengths=LENGTHS, bytes=4096, compressed=None):
    config = DeclutrConfig(**(objective or {"masking": tiny.HALF}))
    train_step = tiny_train_step(tiny_encoder(**DROPOUT), config, comm=comm, microbatch_tokens=tokens)
    if overlap:
        body = list(train_step.encoder.model.base_model.parameters())
        heads = [p for p in train_step.encoder.parameters() if id(p) not in {id(one) for one in body}]  # sent last
        sums = BucketedReducer([*heads, *body], compressed, bytes)
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
    train_step._sum(list(train_step.encoder.parameters()))
    gradients = [p.grad.clone() for p in train_step.encoder.parameters()]
    for step in (1, 2):
        train_step.step({"": batch}, step)
    return gradients, parameters(train_step), sent


def both(comm):
    return {name: [sums_of(comm, overlap, case) for overlap in (False, True)] for name, case in CASES.items()}


def two_ranks(comm):
    """What the tests below read of two ranks, which start once."""
    compressed = [sums_of(comm, *case)[0] for case in ((False, {}), (True, {"compressed": torch.bfloat16}))]
    cases = (True,), (False,), (True, 0, False), (True, 0), (True, 1), (True, 2)
    exchanges = [exchanges_of(comm, *case) for case in cases]
    return {"compressed": compressed, "ended": not_finite(comm), "exchanges": exchanges, "sums": both(comm)}


@pytest.fixture(scope="module")
def pair():
    ranks = run_group(2, two_ranks)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_those_after_the_backward(size, pair):
    """With two workers even to the bit, because a + b = b + a."""
    ranks = pair["sums"] if size == 2 else run_group(size, both)
    for results in ranks:
        for name, (plain, overlapped) in results.items():
            assert max(g.abs().max() for g in plain[0]) > 0, name
            assert max(deviation(overlapped[part], plain[part]) for part in (0, 1)) < 1e-10, name
            if size == 2:
                assert all(torch.equal(a, b) for a, b in zip(overlapped[1], plain[1], strict=True)), name
    for sent, buckets in (ranks[0][name][1][2] for name in ("one pass", "two passes")):
        assert 5 < buckets / 2 < sent <= buckets  # most are on their way when the backward ends


@pytest.mark.dist
def test_compressed_sums_keep_three_digits(pair):
    for exact, compressed in pair["compressed"]:
        exact, compressed = (torch.cat([gradient.flatten() for gradient in sums]) for sums in (exact, compressed))
        assert (exact - compressed).norm() < 2.0**-8 * exact.norm()
        assert deviation([compressed], [exact]) > 1e-6  # it is compressed


def not_finite(comm):
    train_step, batch = setup(comm, True)
    with torch.no_grad():
        train_step.encoder.projection[0].weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteLossError) as error:
        train_step.step({"": batch}, 1)
    return str(error.value)


@pytest.mark.dist
def test_a_bad_loss_ends_on_every_rank(pair):
    assert all("loss nan" in message for message in pair["ended"])


RANKS = 6
LARGE = 2**62 + 1  # its bits are lost in a float
COMBINES = (torch.add, torch.maximum, torch.bitwise_or)


def own(rank):
    return torch.tensor([rank + 1, -rank, LARGE if rank == 0 else 0, 1 << rank])


def on_ranks(comm):
    found = {}
    for size in range(1, comm.size + 1):
        dist.barrier()
        if comm.rank < size:
            for combine in COMBINES:
                values = own(comm.rank)
                result = reduce_by_doubling(values, comm.rank, size, combine)
                assert torch.equal(values, own(comm.rank)), "the argument is unchanged"
                found[size, combine.__name__] = result.tolist()
    requests = Request.SAVE if comm.rank == 1 else Request.STOP if comm.rank == 4 else Request(0)
    return found, comm.all_reduce_max(-comm.rank), comm.all_reduce_counts([comm.rank, 1]), comm.all_reduce_or(requests)


@pytest.mark.dist
def test_doubling_any_number_of_ranks_gives_the_result_of_one_process():
    results = run_group(RANKS, on_ranks)
    for size in range(1, RANKS + 1):
        for combine in COMBINES:
            expected = functools.reduce(combine, map(own, range(size))).tolist()
            assert all(sums[size, combine.__name__] == expected for sums, *_ in results[:size])
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


def exchanges_of(comm, automatic, at=None, graph=True):
    """Exchanges of integers in a step, the requests agreed on, the limit of a microbatch, the loss and parameters.

    Rank 1 runs out of memory once, in that forward of the first pass (without a graph) or of the second one.
    """
    comm = Recorded(comm.rank, comm.size)
    train_step, batch = setup(comm, True)
    train_step = with_task(train_step, microbatch=Microbatch(30, automatic=automatic))
    if comm.rank == 1 and at is not None:
        tiny.run_out_of_memory(train_step.encoder, at, graph)
    agreement = Agreement(lambda: Request.REPORT if comm.rank else Request.STOP)
    loss = train_step.begin({"": batch}, 1, agreement).read().loss
    limit = train_step.tasks[0].microbatch.max_tokens
    return list(comm.names), agreement.agreed, limit, loss, parameters(train_step)


@pytest.mark.dist
def test_step_has_two_exchanges_of_integers_that_carry_all_requests_and_is_repeated_without_memory(pair):
    plain = ["counts", "or"]
    again = ["max", "max", *plain]  # of the smaller microbatch and the repeated step
    for results in pair["exchanges"]:
        exchanges, requests, limits, losses, weights = zip(*results, strict=True)
        assert exchanges == (plain, plain, ["counts", *again], *[[*plain, *again]] * 3)
        assert set(requests) == {Request.STOP | Request.REPORT}
        assert [limit < 30 for limit in limits] == [False, False, True, True, True, True]
        assert losses == pytest.approx([losses[0]] * 6)
        assert max(deviation(repeated, weights[0]) for repeated in weights) < 1e-12
