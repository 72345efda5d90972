"""Configuration: one YAML a run, one section a command, dotted overrides, one validation, every problem at once."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from common.credentials import redact, refused_settings

SECTIONS = ("prepare", "train")
_TRUST = "trust_remote_code"


class Strict(BaseModel):
    """Base of every configuration branch: unknown keys are errors, values are frozen, docstrings describe fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line a problem: key, value, limit, what to do."""

    def __init__(self, title: str, problems: Sequence[str]) -> None:
        self.problems = [redact(problem) for problem in problems]
        super().__init__("\n".join([f"{title}: {len(self.problems)} problem(s)", *(f"  - {p}" for p in self.problems)]))


Config = TypeVar("Config", bound=Strict)


def find_config(name: str) -> Path:
    """Path of a config file: as given, else beside the code, because `ray submit` runs scripts from the home folder.

    Raises:
        ConfigError: there is no such file in either place.
    """
    given = Path(name)
    candidates = (given, Path(__file__).resolve().parent.parent / given)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ConfigError(name, [f"no such config file; looked at {' and '.join(str(c.absolute()) for c in candidates)}"])


def load_config(name: str, section: str, model: type[Config], overrides: Sequence[str] = ()) -> Config:
    """Reads `section` of the YAML file `name`, applies `key.sub=value` overrides in order, validates once.

    Overrides are relative to the section. Values are YAML (`workers=2`, `inputs=[a.txt]`, `objective={kind: mlm}`).

    A file cannot grant trust, because it may come from someone else: `trust_remote_code` counts as an override only.

    Raises:
        ConfigError: with every problem of the file, the overrides and the values.
    """
    path = find_config(name)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(name, [f"is not YAML: {_yaml_problem(error)}"]) from error
    if not isinstance(tree, dict) or not set(tree) <= set(SECTIONS):
        found = sorted(map(str, tree)) if isinstance(tree, dict) else type(tree).__name__
        raise ConfigError(name, [f"top level must hold the sections {' and/or '.join(SECTIONS)}, found {found}"])
    if section not in tree:
        raise ConfigError(name, [f"has no section `{section}`, which this command reads; it has {sorted(tree)}"])
    values = tree[section] if tree[section] is not None else {}
    if not isinstance(values, dict):
        raise ConfigError(name, [f"{section} = {values!r} must be a section with keys of its own"])
    withdrawn = _withdraw_trust(values)
    problems = [problem for text in overrides if (problem := _override(values, text))]
    decided = flat_keys(values)
    problems += [
        f"{key} = true: a file cannot grant trust. Remove the key from the file; if you trust the code of that model, "
        f"add {key}=true to the command"
        for key in withdrawn
        if key not in decided
    ]
    problems += refused_settings(values)
    try:
        config = model.model_validate(values)
    except ValidationError as error:
        problems += describe(error, model)
    if problems:
        raise ConfigError(f"{name} ({section})", problems)
    return config


def _withdraw_trust(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Removes every `trust_remote_code` of a file that is not false, in place; returns their dotted keys."""
    found = []
    for key, value in list(tree.items()):
        if isinstance(value, dict):
            found += _withdraw_trust(value, f"{prefix}{key}.")
        elif key == _TRUST and value is not False:
            del tree[key]
            found.append(prefix + key)
    return found


def _override(tree: dict[str, Any], text: str) -> str | None:
    """Applies one `a.b=value` in place; returns what is wrong with it, if anything."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        return f"override {text!r} is not of the form key=value"
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        return f"override {key}: {value!r} is not YAML: {_yaml_problem(error)}"
    *parents, last = key.split(".")
    for parent in parents:
        if tree.get(parent) is None:  # absent, or a key without a value
            tree[parent] = {}
        child = tree[parent]
        if not isinstance(child, dict):
            return f"override {key}: `{parent}` holds {child!r}, not a branch with keys of its own"
        tree = child
    tree[last] = parsed
    return None


def _yaml_problem(error: Exception) -> str:
    """What is wrong and where, without the lines around it: a cut piece of an address cannot be told for one."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem}, line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return str(error)


def describe(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line a problem: dotted key, the value it holds, what is wrong with it."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(whole section)"
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(item["loc"][-1]), _known_keys(model), n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            lines.append(f"{key}: unknown key{hint}")
        elif item["type"] == "missing":
            lines.append(f"{key}: missing, and it has no default")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines += [f"{key} = {item['input']!r}: {message}"] if item["loc"] else message.splitlines()
    return lines


def _known_keys(model: type[BaseModel]) -> list[str]:
    """Every key that occurs anywhere in a config tree, for suggestions."""
    schema = model.model_json_schema()
    tables = [schema, *schema.get("$defs", {}).values()]
    return sorted({key for table in tables for key in table.get("properties", {})})


def print_config(config: Strict) -> str:
    """The resolved configuration as YAML: what `--print-config` shows and every run writes beside its results."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def flat_keys(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of settings with its nested keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flat_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def expand(path: str) -> Path:
    """A user's path with `~` and `$VARIABLES` expanded."""
    return Path(os.path.expandvars(path)).expanduser()
