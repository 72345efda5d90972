"""Objectives of installed packages that cannot be used: the message names the package and what is wrong."""

import pytest

from common.config import ConfigError
from trainer.objectives.registry import load_kinds

CLASS = """
from typing import ClassVar, Literal
from trainer.objectives.config import ObjectiveConfig
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
        ("spoilt_absent", None, "ModuleNotFoundError: No module named 'spoilt_absent'"),
        ("spoilt_raises", "raise RuntimeError('boom')", "RuntimeError: boom"),
        ("spoilt_empty", "", "AttributeError: module 'spoilt_empty' has no attribute 'Config'"),
        ("spoilt_other", "Config = dict", "must name a subclass of ObjectiveConfig"),
        ("spoilt_kind", CLASS.replace('    kind: Literal["spoilt"] = "spoilt"', ""), "its class must define `kind: "),
        ("spoilt_string", CLASS.replace('Literal["spoilt"]', "str"), "its class must define `kind: Literal"),
        ("spoilt_names", CLASS.replace("metrics: ", "names: ").replace("method: ", "way: "), "metrics, method"),
        ("spoilt_text", CLASS.replace('("one",)', '"one"'), "metrics = 'one' must be a tuple of names"),
        ("spoilt_loss", CLASS.replace('"one"', '"loss"'), "metrics may not have the names ['loss']"),
    ],
)
def test_the_message_names_package_entry_point_and_cause(tmp_path, monkeypatch, module, source, said):
    install(tmp_path, monkeypatch, "spoilt-objective", module, source)
    with pytest.raises(ConfigError) as raised:
        load_kinds()
    (problem,) = raised.value.problems
    assert f"package spoilt-objective: entry point spoilt = {module}:Config (declutr.objectives)" in problem
    assert said in problem
    assert problem.endswith("correct or uninstall the package")


def test_two_packages_with_the_same_kind(tmp_path, monkeypatch):
    install(tmp_path / "one", monkeypatch, "first-objective", "spoilt_first", CLASS)
    assert "spoilt" in load_kinds()
    install(tmp_path / "two", monkeypatch, "second-objective", "spoilt_second", CLASS)
    with pytest.raises(ConfigError, match=r"package (first|second)-objective: .* has the kind 'spoilt' already"):
        load_kinds()


def test_no_package_takes_the_kind_of_this_project(tmp_path, monkeypatch):
    source = CLASS.replace("spoilt", "declutr")
    install(tmp_path, monkeypatch, "spoilt-objective", "spoilt_taken", source, kind="declutr")
    with pytest.raises(ConfigError, match="DeclutrConfig has the kind 'declutr' already"):
        load_kinds()
