"""Names of Ray that are not public: one file has them, and the installed Ray has them."""

import ast
import tomllib

import pytest
import ray
import tinyruns as runs
from messages import says

from declutr.trainer.worker.ray_internals import SUPPORTED, unsupported_ray

PACKAGES = ("src", "pipeline", "trainer", "benchmarks")
ALLOWED = "trainer/worker/ray_internals.py"


def private(name):
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
    used = {
        str(path.relative_to(runs.ROOT))
        for package in PACKAGES
        for path in (runs.ROOT / package).rglob("*.py")
        if any(private(name) for name in names_in(path.read_text()))
    }
    assert used == {ALLOWED}


def test_the_installed_ray_has_them():
    message = unsupported_ray()
    if message:
        pytest.fail(message, pytrace=False)


def test_a_missing_name_is_named_with_the_versions():
    message = unsupported_ray({"ray._private.state": ["state.get_draining_nodes", "state.gone"], "ray.lost": ["name"]})
    says(
        message,
        f"ray {ray.__version__}",
        "ray._private.state.state.gone",
        "ray.lost.name",
        f"pip install 'ray[data,train]{SUPPORTED}'",
    )
    project = tomllib.loads((runs.ROOT / "pyproject.toml").read_text())["project"]
    assert f"ray[data,train]{SUPPORTED}" in project["dependencies"]
