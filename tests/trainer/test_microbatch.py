"""The automatic microbatch: memory that really runs out, and a result that does not change."""

import json
import subprocess
import sys

import pytest
import torch
from messages import all_of
from tiny import random_spans

from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.step.microbatch import Microbatch, MicrobatchError

# A process of its own, because the limit on its memory cannot be taken back.
SCRIPT = """
import json, resource, sys
import torch
from tiny import documents, rank_batch, tiny_encoder, tiny_collator, tiny_train_step
from declutr.trainer.step.microbatch import Microbatch
from declutr.trainer.objectives.declutr.config import DeclutrConfig

torch.set_num_threads(1)
shape = {"hidden_size": 64, "intermediate_size": 8192}
def gradient(microbatch):
    train_step = tiny_train_step(tiny_encoder(from_config=shape, dropout=0.1))
    train_step.tasks[0].microbatch.max_tokens, train_step.tasks[0].microbatch.automatic = microbatch
    batch = rank_batch(tiny_collator(DeclutrConfig()), documents([200] * 50, 12))
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
    path = [entry for entry in sys.path if entry]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n" + SCRIPT, "300"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["limit"] is not None
    assert found["limit"] < found["tokens"]  # the whole share did not fit
    assert found["worst"] < 1e-10


def test_lowering_halves_and_ends():
    spans = random_spans([6, 20, 9])
    microbatch = Microbatch(None, automatic=True)
    for expected in (20,):
        microbatch.lower(spans, Communicator())
        assert microbatch.max_tokens == expected
    with pytest.raises(MicrobatchError, match=all_of("one span", "20 tokens")):
        microbatch.lower(spans, Communicator())


def test_microbatch_settings_choose_the_size():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert Microbatch.of(None, cpu) == Microbatch(None, automatic=False)
    assert Microbatch.of(77, gpu) == Microbatch(77, automatic=False)
    assert Microbatch.of("auto", gpu) == Microbatch(None, automatic=True)
    assert Microbatch.of("auto", cpu).max_tokens == 8192
