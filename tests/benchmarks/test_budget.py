"""A step on a GPU does not become heavier: RoBERTa-base, 16 documents, bfloat16, by `benchmarks.gpu.budget`."""

import json

import pytest
import torch
from torch._subclasses import FakeTensorMode

from benchmarks.gpu import budget
from benchmarks.gpu.traffic import counting

MOST_GIGABYTES, MOST_OPERATIONS = 71, 1240
MOST_EAGER_GIGABYTES, MOST_EAGER_OPERATIONS = 130, 1780


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("budget") / "budget.json"
    budget.main(["--json", str(path)])
    return json.loads(path.read_text())


@pytest.mark.slow
def test_a_step_stays_within_its_budget(found):
    assert found["gigabytes"] <= MOST_GIGABYTES
    assert found["operations"] <= MOST_OPERATIONS
    assert found["syncs"] == 0
    assert (found["graphs"], found["breaks"]) == (3, 0), "embeddings, layers, and the loss of the head"
    assert found["eager"]["gigabytes"] <= MOST_EAGER_GIGABYTES
    assert found["eager"]["operations"] <= MOST_EAGER_OPERATIONS
    assert found["eager"]["syncs"] == 0


@pytest.mark.slow
def test_computed_times_are_those_of_products_and_of_the_bandwidth(found):
    """On an H100, 989 TFLOP/s and 3.35 TB/s; a step takes the time of both."""
    times = found["milliseconds"]["H100"]
    assert times["step"] == pytest.approx(times["products"] + times["others"], abs=0.11)
    assert times["mfu"] == pytest.approx(0.65 * times["products"] / times["step"], rel=0.01)
    rest = found["gigabytes"] - found["largest"]["products"]
    assert times["others"] == pytest.approx(rest / (0.85 * 3.35), rel=0.01)


def test_a_wait_is_counted():
    """Reads of values, results whose shape is a value, and copies from the CPU; planning on the CPU is none."""
    mode = FakeTensorMode()
    on_gpu = mode.from_tensor(torch.ones(4))
    planned = torch.arange(4)
    with counting(mode) as traffic:
        on_gpu + on_gpu
        planned.tolist()
        assert not traffic.syncs
        assert float(on_gpu.sum()) == 1.0
        on_gpu.tolist()
        on_gpu[planned]
        on_gpu.new_tensor([1.0])
    # a fake tensor reads a list item by item
    assert traffic.syncs == {"__float__": 1, "item": 4, "index": 1, "new_tensor": 1}


def test_budget_bytes_equal_a_plain_count():
    """Each tensor once for each kernel: views are free, look-ups read the rows that they name."""
    mode = FakeTensorMode()
    table, rows = mode.from_tensor(torch.ones(1000, 8)), mode.from_tensor(torch.zeros(5, dtype=torch.int64))
    with counting(mode) as traffic:
        torch.nn.functional.embedding(rows, table)
    assert sum(traffic.bytes.values()) == 2 * 5 * 8 * 4 + 5 * 8
    with counting(mode) as traffic:
        table.t() + 1
    assert (sum(traffic.operations.values()), sum(traffic.bytes.values())) == (1, 2 * 1000 * 8 * 4)


def test_an_optimizer_without_a_result_is_counted():
    """A fused AdamW reads weight, gradient and two moments, and writes all but the gradient."""
    mode = FakeTensorMode()
    with mode:
        weight = torch.nn.Parameter(torch.empty(1000))
        weight.grad = torch.empty(1000)
        optimizer = torch.optim.AdamW([weight], fused=True)
    with counting(mode) as traffic:
        with traffic.pausing():
            optimizer.step()
        optimizer.step()
    assert traffic.bytes["_fused_adamw_"] == 7 * 1000 * 4 + 4  # and the number of the step
    assert traffic.operations["_fused_adamw_"] == 1
