"""Objectives of installed packages that cannot be used: the message names the package and what is wrong."""

import os
import re
from typing import ClassVar, Literal

import pytest
import tinyruns as runs
from madeup import shards
from messages import says
from processes import run_python

from declutr.trainer.driver.checks import objective_problems, place_problems
from declutr.trainer.objectives.config import ObjectiveConfig
from declutr.trainer.objectives.registry import load_kinds

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
    ("module", "source", "said"),
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
    ],
)
def test_the_message_names_package_entry_point_and_cause(tmp_path, monkeypatch, module, source, said):
    install(tmp_path, monkeypatch, "spoilt-objective", module, source)
    kinds, problems_of = load_kinds()
    assert "spoilt" not in kinds
    problem = problems_of.pop("spoilt")
    assert not problems_of
    says(problem, "spoilt-objective", f"spoilt = {module}:Config", "declutr.objectives")
    says(problem, said)
    says(problem, "correct or uninstall")


@pytest.mark.slow
def test_a_package_that_cannot_be_used_stops_only_what_names_its_kind(tmp_path, monkeypatch):
    """Its import ends the process with status 0; commands that do not need it ended with that, silently."""
    install(tmp_path, monkeypatch, "spoilt-objective", "spoilt_exits", "import sys; sys.exit(0)")

    def declutr(*words):
        path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(runs.ROOT / "src")])}
        return run_python("-m", "declutr.cli.main", *words, env=path, check=False, timeout=60)

    found = declutr("inspect", shards(tmp_path / "data"))
    assert (found.returncode, found.stdout[:6]) == (0, "Shards"), found.stderr
    train = {"run": "r", "data": str(tmp_path / "data"), "encoder": {"from_config": {"model_type": "roberta"}}}
    config = runs.write_config(tmp_path / "c.yaml", train=train | {"objective": {"kind": "spoilt"}})
    found = declutr("train", config, "--print-config")
    assert found.returncode == 1
    says(found.stderr, "spoilt-objective", "spoilt = spoilt_exits:Config")
    assert declutr("train", config, "--print-config", "objective={kind: simcse}").returncode == 0


def test_packages_with_the_same_kind_are_refused(tmp_path, monkeypatch):
    install(tmp_path / "one", monkeypatch, "first-objective", "spoilt_first", CLASS)
    assert "spoilt" in load_kinds()[0]
    install(tmp_path / "two", monkeypatch, "second-objective", "spoilt_second", CLASS)
    assert re.match(".*(first|second)-objective: .*'spoilt'", load_kinds()[1]["spoilt"])


def test_no_package_takes_the_kind_of_this_project(tmp_path, monkeypatch):
    source = CLASS.replace("spoilt", "declutr")
    install(tmp_path, monkeypatch, "spoilt-objective", "spoilt_taken", source, kind="declutr")
    says(load_kinds()[1]["declutr"], "DeclutrConfig", "'declutr'")


# Unfit is in no entry point, so the union of kinds does not know it; pydantic dumps it all the same.
UNKNOWN_TO_PYDANTIC = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")


class Unfit(ObjectiveConfig):
    """Settings whose implementation cannot be used."""

    metrics: ClassVar[tuple[str, ...]] = ("one",)
    method: ClassVar[str] = "a test"
    kind: Literal["unfit"] = "unfit"


@UNKNOWN_TO_PYDANTIC
@pytest.mark.parametrize(
    ("implementation", "said"),
    [
        ("spoilt_leaves:Nothing", "SystemExit: 0"),
        ("nowhere.objective:Nothing", ("ModuleNotFoundError", "'nowhere'")),
        ("declutr.trainer.objectives.base:Nothing", "AttributeError: "),
        ("declutr.trainer.objectives.base", "AttributeError: "),
        ("json:JSONDecoder", "subclass of Objective"),
        ("declutr.trainer.objectives.base:Objective", "collator, loss"),
    ],
)
def test_an_implementation_that_cannot_be_used_is_found_before_ray_starts(tmp_path, monkeypatch, implementation, said):
    (tmp_path / "spoilt_leaves.py").write_text("import sys; sys.exit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Unfit, "implementation", implementation, raising=False)
    config = runs.train_config(shards(tmp_path / "data"), tmp_path / "run").model_copy(update={"objective": Unfit()})
    (problem,) = [line for line in objective_problems(config.main) if line.startswith("objective.kind = unfit")]
    says(problem, f"implementation = {implementation!r}", said)


@UNKNOWN_TO_PYDANTIC
def test_mlm_without_its_metric_is_found_before_ray_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(Unfit, "implementation", "declutr.trainer.objectives.declutr.objective:Declutr", raising=False)
    monkeypatch.setattr(Unfit, "mlm", True)
    config = runs.train_config(shards(tmp_path / "data"), tmp_path / "run").model_copy(update={"objective": Unfit()})
    assert any("lacks 'mlm'" in line for line in objective_problems(config.main))


def test_an_objective_whose_package_is_not_installed():
    (problem,) = place_problems({"objective": {"kind": "spoilt"}})
    says(problem, "objective spoilt", "no package")
    assert place_problems({"objective": {"kind": "DeCLUTR"}}) == []
    assert place_problems({"objective": None}) == []
