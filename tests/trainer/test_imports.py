"""Names of torch and Ray that are not public, in one file each; what an import loads; objectives of packages.

The message on a package that cannot be used names it and what is wrong.
"""

import os
import re
from typing import ClassVar, Literal

import pytest
import ray
import tinyruns as runs
import torch
from madeup import shards
from messages import says
from processes import run_python

from declutr.trainer import torch_private as private
from declutr.trainer.driver.checks import objective_problems, place_problems
from declutr.trainer.objectives.config import ObjectiveConfig
from declutr.trainer.objectives.registry import load_kinds

PACKAGES = ("src", "pipeline", "trainer")
TORCH_PRIVATE = re.compile(r"torch(?:\.\w+)*\._[a-z]\w*|torch\.ops\.(?!declutr)\w+\._\w+")
PRIVATE_NAME = r"(?:_(?!_)\w+|internal_kv|generated)\b"
RAY_PRIVATE = re.compile(rf"\bray(?:\.\w+)*\.{PRIVATE_NAME}|\bfrom ray[\w.]* import (?:\([^)]*|.*)\b{PRIVATE_NAME}")
TORCH_FILE, RAY_FILE = "trainer/torch_private.py", "trainer/worker/channel.py"


def test_one_file_uses_names_of_torch_or_of_ray_that_are_not_public():
    def files_with(names, *packages):
        files = [path for package in packages for path in (runs.ROOT / package).rglob("*.py")]
        return {str(path.relative_to(runs.ROOT)) for path in files if names.search(path.read_text())}

    assert files_with(TORCH_PRIVATE, *PACKAGES) == {TORCH_FILE}
    assert files_with(RAY_PRIVATE, *PACKAGES, "benchmarks") == {RAY_FILE}


def test_the_installed_torch_has_them():
    # Small integers: their sums are exact in bfloat16, whatever the order of the additions.
    weight, inputs, bias = torch.arange(24.0).view(6, 4) - 12, torch.arange(12.0).view(3, 4) - 6, torch.arange(6.0)
    many, step, moments = [torch.full((2,), 3.0)], torch.full((), 1.0), [[torch.zeros(2)], [torch.zeros(2)]]
    settings = {"lr": 0.5, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 0.0}
    try:
        private.multiply_all(many, 2.0)
        assert many[0].tolist() == [6.0, 6.0]
        private.fused_adamw(many, [torch.ones(2)], *moments, [], [step], amsgrad=False, maximize=False, **settings)
        assert many[0].tolist() == pytest.approx([5.5, 5.5])
        version = private.versions(many)
        private.copy_all(many, [torch.ones(2, dtype=torch.bfloat16)])
        assert many[0].tolist() == [1.0, 1.0]
        assert private.versions(many) > version
        private.raise_recompile_limit(torch._dynamo.config.recompile_limit)
        for dtype in filter(private.can_pack_linear, (torch.float32, torch.bfloat16)):
            w, x, b = (tensor.to(dtype) for tensor in (weight, inputs, bias))
            with torch.inference_mode():
                torch.testing.assert_close(private.packed_linear(x, private.pack_linear(w, 16), b), x @ w.T + b)
    except (AttributeError, TypeError, RuntimeError) as error:
        pytest.fail(f"torch {torch.__version__} lacks or has changed a name of {TORCH_FILE}: {error}", pytrace=False)


def test_the_installed_ray_has_them():
    """Ray's head has the methods, and the imports of the file succeed; this asks no cluster."""
    from ray._private.state import state
    from ray._raylet import InnerGcsClient
    from ray.core.generated import autoscaler_pb2
    from ray.experimental import internal_kv

    calls = [f"internal_kv_{verb}" for verb in ("put", "get", "multi_get", "keys", "del")]
    needed = [(InnerGcsClient, name) for name in [*calls, "drain_node"]] + [(state, "get_draining_nodes")]
    needed += [(autoscaler_pb2, "DRAIN_NODE_REASON_PREEMPTION"), (internal_kv, "internal_kv_get_gcs_client")]
    source = (runs.ROOT / RAY_FILE).read_text()
    assert [name for _, name in needed if name not in source] == []
    if missing := [name for owner, name in needed if not hasattr(owner, name)]:
        pytest.fail(f"ray {ray.__version__} lacks {', '.join(missing)} of {RAY_FILE}", pytrace=False)


PREPARE = "declutr.pipeline.prepare, declutr.pipeline.job.worker"
TRAIN = "declutr.trainer.train, declutr.trainer.driver.supervisor, declutr.cli.runs, declutr.inspection.describe"
LIBRARIES = [
    ("declutr", {"torch", "ray", "pydantic", "numpy", "transformers", "yaml"}),
    (PREPARE, {"torch", "PIL", "soundfile", "transformers.audio_utils", "scipy.signal"}),
    pytest.param(
        f"{TRAIN}, declutr.inspection.order", {"torch", "transformers", "scipy.stats"}, marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("modules", "forbidden"), LIBRARIES, ids=["the package", "prepare", "train and inspect"])
def test_import_loads_no_library_that_it_does_not_need(modules, forbidden):
    code = f"import sys, {modules}; assert dir(declutr); print(*sorted({forbidden!r} & set(sys.modules)))"
    assert run_python("-c", code).stdout == "\n"


CLASS = """
from typing import ClassVar, Literal
from declutr.trainer.objectives.config import ObjectiveConfig
class Config(ObjectiveConfig):
    implementation: ClassVar = "nowhere:Nothing"
    metrics: ClassVar = ("one",)
    method: ClassVar = "a test"
    kind: Literal["spoilt"] = "spoilt"
"""


def install(folder, monkeypatch, package, module, source, kind="spoilt"):
    """A package of one module with an entry point, on the path of this process."""
    info = folder / f"{package}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[declutr.objectives]\n{kind} = {module}:Config\n")
    if source is not None:
        (folder / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize(
    ("module", "source", "parts"),
    [
        ("spoilt_absent", None, ("ModuleNotFoundError", "'spoilt_absent'")),
        ("spoilt_raises", "raise RuntimeError('boom')", "RuntimeError: boom"),
        ("spoilt_exits", "import sys; sys.exit(0)", "SystemExit: 0"),
        ("spoilt_empty", "", ("AttributeError", "'spoilt_empty'", "'Config'")),
        ("spoilt_other", "Config = dict", "subclass of ObjectiveConfig"),
        ("spoilt_kind", CLASS.replace('    kind: Literal["spoilt"] = "spoilt"', ""), ("class", "`kind:")),
        ("spoilt_string", CLASS.replace('Literal["spoilt"]', "str"), ("class", "`kind: Literal")),
        ("spoilt_names", CLASS.replace("metrics: ", "names: ").replace("method: ", "way: "), "metrics, method"),
        ("spoilt_text", CLASS.replace('("one",)', '"one"'), ("metrics = 'one'", "tuple")),
        ("spoilt_loss", CLASS.replace('"one"', '"loss"'), ("metrics", "['loss']")),
        ("spoilt_field", f"{CLASS}    width: 'Unknown' = None\n", ("PydanticUndefinedAnnotation", "'Unknown'")),
    ],
)
def test_the_message_names_package_entry_point_and_cause(tmp_path, monkeypatch, module, source, parts):
    install(tmp_path, monkeypatch, "spoilt-objective", module, source)
    kinds, problems_of = load_kinds()
    assert "spoilt" not in kinds
    problem = problems_of.pop("spoilt")
    assert not problems_of
    says(problem, "spoilt-objective", f"spoilt = {module}:Config", "declutr.objectives")
    says(problem, parts)
    says(problem, "correct or uninstall")


@pytest.mark.slow
def test_a_package_that_cannot_be_used_stops_only_what_names_its_kind(tmp_path, monkeypatch):
    """Its import ends the process with status 0; commands that do not need it ended with that, silently."""
    install(tmp_path, monkeypatch, "spoilt-objective", "spoilt_exits", "import sys; sys.exit(0)")

    def declutr(*words):
        path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(runs.ROOT / "src")])}
        return run_python("-m", "declutr.cli.main", *words, env=path, check=False, timeout=60)

    done = declutr("inspect", shards(tmp_path / "data"))
    assert (done.returncode, done.stdout[:6]) == (0, "Shards"), done.stderr
    train = {"run": "r", "data": str(tmp_path / "data"), "encoder": {"from_config": {"model_type": "roberta"}}}
    config = runs.write_config(tmp_path / "c.yaml", train=train | {"objective": {"kind": "spoilt"}})
    done = declutr("train", config, "--print-config")
    assert done.returncode == 1
    says(done.stderr, "spoilt-objective", "spoilt = spoilt_exits:Config")
    assert declutr("train", config, "--print-config", "objective={kind: simcse}").returncode == 0


def test_packages_with_the_same_kind_or_one_of_this_project_are_refused(tmp_path, monkeypatch):
    install(tmp_path / "one", monkeypatch, "first-objective", "spoilt_first", CLASS)
    assert "spoilt" in load_kinds()[0]
    install(tmp_path / "two", monkeypatch, "second-objective", "spoilt_second", CLASS)
    assert re.match(".*(first|second)-objective: .*'spoilt'", load_kinds()[1]["spoilt"])
    source = CLASS.replace("spoilt", "declutr")
    install(tmp_path, monkeypatch, "spoilt-objective", "spoilt_taken", source, kind="declutr")
    says(load_kinds()[1]["declutr"], "DeclutrConfig", "'declutr'")
    (problem,) = place_problems({"objective": {"kind": "not_installed"}})
    says(problem, "objective not_installed", "no package")
    assert place_problems({"objective": {"kind": "DeCLUTR"}}) == place_problems({"objective": None}) == []


# Unfit is in no entry point, so the union of kinds does not know it; pydantic dumps it all the same.


class Unfit(ObjectiveConfig):
    metrics: ClassVar[tuple[str, ...]] = ("one",)
    method: ClassVar[str] = "a test"
    kind: Literal["unfit"] = "unfit"


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
def test_an_implementation_that_cannot_be_used_is_found_before_ray_starts(tmp_path, monkeypatch):
    """One with MLM must name its metric."""
    (tmp_path / "spoilt_leaves.py").write_text("import sys; sys.exit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    config = runs.train_config(shards(tmp_path / "data"), tmp_path / "run").model_copy(update={"objective": Unfit()})
    for implementation, parts in (
        ("spoilt_leaves:Nothing", "SystemExit: 0"),
        ("nowhere.objective:Nothing", ("ModuleNotFoundError", "'nowhere'")),
        ("declutr.trainer.objectives.base:Nothing", "AttributeError: "),
        ("declutr.trainer.objectives.base", "AttributeError: "),
        ("json:JSONDecoder", "subclass of Objective"),
        ("declutr.trainer.objectives.base:Objective", "collator, loss"),
    ):
        monkeypatch.setattr(Unfit, "implementation", implementation, raising=False)
        (problem,) = [line for line in objective_problems(config.main) if line.startswith("objective.kind = unfit")]
        says(problem, f"implementation = {implementation!r}", parts)
    monkeypatch.setattr(Unfit, "implementation", "declutr.trainer.objectives.declutr.objective:Declutr")
    monkeypatch.setattr(Unfit, "mlm", True)
    assert any("lacks 'mlm'" in line for line in objective_problems(config.main))
