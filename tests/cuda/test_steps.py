"""The whole train step on a GPU without values: nothing mixes devices, and nothing waits for the GPU."""

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from processes import ROOT, run_python

pytestmark = pytest.mark.nightly
HERE = Path(__file__).parent
# SCL's number of anchors is a result of labels on the GPU, a loss of another package looks for pairs, and sums that do
# not depend on the number of workers are checked for overflow. Nothing else may wait.
WAITS = dict.fromkeys(("scl", "scl, in groups", "scl, microbatches", "4 workers, scl, share"), "nonzero")
WAITS |= {"declutr, a loss by name": "where", "4 workers, deterministic": "__int__"}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of all cases, from one process, because torch must find the GPU when it is imported."""
    if torch.version.cuda:
        pytest.skip("this torch has its own GPUs; `make gpu` uses a real one")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++: a device without a GPU is registered by a library that needs a C++ compiler")
    [torch_] = importlib.util.find_spec("torch").submodule_search_locations
    includes = [f"-I{torch_}/include", f"-I{torch_}/include/torch/csrc/api/include"]
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    options = ["-std=c++20", "-shared", "-fPIC", *includes]
    subprocess.run([compiler, *options, HERE / "guard.cpp", "-o", library], check=True)
    paths = os.pathsep.join(map(str, (HERE, ROOT / "tests/support", ROOT)))
    variables = {"PYTHONPATH": paths, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    return json.loads(run_python(HERE / "steps.py", library, env=variables).stdout.splitlines()[-1])


def test_no_step_mixes_devices(found):
    """Every objective; microbatches, dropped attention weights, overlapped sums and shares of the loss."""
    assert len(found) > 30
    assert {name: result["error"] for name, result in found.items() if "error" in result} == {}
    assert {name for name, result in found.items() if not result["gradients"]} == set()


def test_no_step_waits_for_the_gpu(found):
    waits = {name: result["waits"] for name, result in found.items()}
    assert {name: places for name, places in waits.items() if places and name not in WAITS} == {}
    for name, expected in WAITS.items():
        assert any(place.startswith(f"{expected} at ") for place in waits[name]), f"{name} waits no longer: expect that"
