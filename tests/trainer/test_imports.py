"""Names of torch and Ray that are not public, in one file each; what an import loads."""

import ast
import re

import pytest
import ray
import tinyruns as runs
import torch
from processes import run_python

from declutr.trainer import torch_private as private

TORCH_PRIVATE = re.compile(r"torch(?:\.\w+)*\._[a-z]\w*|torch\.ops\.(?!declutr)\w+\._\w+")
TORCH_FILE = "trainer/torch_private.py"


def files_that(condition, *packages):
    """Files of these packages whose source meets a condition."""
    files = [path for package in packages for path in (runs.ROOT / package).rglob("*.py")]
    return {str(path.relative_to(runs.ROOT)) for path in files if condition(path.read_text())}


def test_one_file_uses_names_of_torch_that_are_not_public():
    assert files_that(TORCH_PRIVATE.search, "src", "pipeline", "trainer") == {TORCH_FILE}


def test_the_installed_torch_has_them():
    # Small integers: their sums are exact in bfloat16, whatever the order of the additions.
    weight, inputs, bias = (
        torch.arange(24.0).reshape(6, 4) - 12,
        torch.arange(12.0).reshape(3, 4) - 6,
        torch.arange(6.0),
    )
    many, step = [torch.full((2,), 3.0)], torch.full((), 1.0)
    moments = [[torch.zeros(2)], [torch.zeros(2)]]
    settings = {"lr": 0.5, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 0.0}
    try:
        private.multiply_all(many, 2.0)
        assert many[0].tolist() == [6.0, 6.0]
        private.fused_adamw(many, [torch.ones(2)], *moments, [], [step], amsgrad=False, maximize=False, **settings)
        assert many[0].tolist() == pytest.approx([5.5, 5.5])
        private.raise_recompile_limit(torch._dynamo.config.recompile_limit)
        for dtype in filter(private.can_pack_linear, (torch.float32, torch.bfloat16)):
            w, x, b = (tensor.to(dtype) for tensor in (weight, inputs, bias))
            with torch.inference_mode():
                outputs = private.packed_linear(x, private.pack_linear(w, 16), b)
            torch.testing.assert_close(outputs, x @ w.T + b)
    except (AttributeError, TypeError, RuntimeError) as error:
        pytest.fail(f"torch {torch.__version__} lacks or has changed a name of {TORCH_FILE}: {error}", pytrace=False)


PACKAGES = ("src", "pipeline", "trainer", "benchmarks")
RAY_FILE = "trainer/worker/channel.py"


def is_private(name):
    """True if a dotted name is of Ray and not public; names such as `__file__` are Python's."""
    first, *parts = name.split(".")
    parts = [part for part in parts if not (part.startswith("__") and part.endswith("__"))]
    hidden = any(part.startswith("_") or part in ("internal_kv", "generated") for part in parts)
    return first == "ray" and hidden


def dotted(node):
    """`a.b.c` of an attribute; empty if it begins with something other than a name."""
    if isinstance(node, ast.Name):
        return node.id
    above = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{above}.{node.attr}" if above else ""


def names_in(source):
    """The names of Ray that a file imports or reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.Attribute):
            yield dotted(node)


def test_one_file_uses_names_of_ray_that_are_not_public():
    assert files_that(lambda source: any(map(is_private, names_in(source))), *PACKAGES) == {RAY_FILE}


def test_the_installed_ray_has_them():
    """Ray's head has the methods, and the imports of the file succeed; this asks no cluster."""
    from ray._private.state import state
    from ray._raylet import InnerGcsClient
    from ray.core.generated import autoscaler_pb2
    from ray.experimental import internal_kv

    calls = [f"internal_kv_{verb}" for verb in ("put", "get", "multi_get", "keys", "del")]
    needed = [(InnerGcsClient, name) for name in [*calls, "drain_node"]]
    needed += [(state, "get_draining_nodes"), (autoscaler_pb2, "DRAIN_NODE_REASON_PREEMPTION")]
    needed += [(internal_kv, "internal_kv_get_gcs_client")]
    source = (runs.ROOT / RAY_FILE).read_text() + (runs.ROOT / "trainer/worker/channel.py").read_text()
    assert [name for _, name in needed if name not in source] == []
    missing = [name for owner, name in needed if not hasattr(owner, name)]
    if missing:
        pytest.fail(f"ray {ray.__version__} lacks {', '.join(missing)} of {RAY_FILE}", pytrace=False)


IMPORTS = [
    ("declutr", {"torch", "ray", "pydantic", "numpy", "transformers", "yaml"}),
    (
        "declutr.pipeline.prepare, declutr.pipeline.job.worker",
        {"torch", "PIL", "soundfile", "transformers.audio_utils", "scipy.signal"},
    ),
    pytest.param(
        "declutr.trainer.train, declutr.trainer.driver.supervisor, declutr.cli.runs, declutr.inspection.describe,"
        " declutr.inspection.order",
        {"torch", "transformers", "scipy.stats"},
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("modules", "forbidden"), IMPORTS, ids=["the package", "prepare", "train and inspect"])
def test_import_loads_no_library_that_it_does_not_need(modules, forbidden):
    code = f"import sys, {modules}; assert dir(declutr); print(*sorted({forbidden!r} & set(sys.modules)))"
    assert run_python("-c", code).stdout == "\n"
