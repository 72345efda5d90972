"""Configuration: one YAML per run, one section per command, dotted overrides, one validation, all problems at once."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from declutr.common.config_docs import below, choices_of, number_problems, unknown_key
from declutr.common.console.logs import get_logger
from declutr.common.errors import ConfigError, nearest, refused_settings, shown_value, suggest
from declutr.common.yamlfile import YamlError, read_yaml, read_yaml_file

SECTIONS = ("prepare", "train")
Precision = Literal["fp32", "bf16"]
AnyPrecision = Literal["auto", "fp32", "bf16"]
_MAX_DEPTH = 64  # as in a file (`MAX_DEPTH` of yamlfile.py)
_CURLY = "“”„‘’"  # quotation marks of word processors and web pages, which no shell removes
_MOST_HINTS = 50  # a comparison with all known keys takes milliseconds
_MOST_NAMED = 4  # settings of a section in a message


class Strict(BaseModel):
    """Base of every configuration section: unknown keys and infinite numbers are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    alternatives: ClassVar[tuple[str, ...]] = ()
    """Settings of which one is given; an override of one replaces the others of the file."""

    def model_post_init(self, context: Any, /) -> None:  # noqa: ARG002 - the signature of pydantic
        """Counts a default `kind` as set: without it, a section among several kinds could not be read again."""
        if "kind" in self.__dict__:
            self.__pydantic_fields_set__.add("kind")


Config = TypeVar("Config", bound=Strict)
Settings: TypeAlias = Config | Mapping[str, Any] | str | Path
"""Settings as Python gives them: validated ones, a section as nested dictionaries, or the path of a YAML file."""


def _plain(value: Any) -> Any:
    """A copy of settings from Python, with paths as strings, as a file has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def find_config(name: str) -> Path:
    """Path of a config file: as given, or next to the code, as `ray submit` runs scripts from the home folder."""
    config_path, code = Path(name), Path(__file__).resolve().parent.parent
    candidates = list(dict.fromkeys((config_path.absolute(), code / config_path)))
    if file := next(filter(os.path.isfile, candidates), None):  # Path.is_file raises for impossible names
        return file
    if "=" in name:
        raise ConfigError(name, ["is a setting; the config file comes first, then key=value"])
    if os.path.isdir(config_path):  # noqa: PTH112
        raise ConfigError(name, ["is a folder; name a YAML file"])
    if os.path.exists(config_path):  # noqa: PTH110
        raise ConfigError(name, ["is a pipe or a device; write it to a YAML file"])
    places = {code / "configs": Path("configs")} | {place.parent: config_path.parent for place in candidates}
    files = {path.stem: shown / path.name for place, shown in places.items() for path in place.glob("*.y*ml")}
    near = nearest(config_path.stem, files)  # among all, by the name alone
    hint = f"; did you mean `{files[near]}`?" if near else ""
    raise ConfigError(name, [f"no such config file; looked at {' and '.join(map(str, candidates))}{hint}"])


def load_config(
    settings: Settings[Config],
    section: str,
    model: type[Config],
    overrides: Sequence[str] = (),
    look: Callable[[dict[str, Any]], list[str]] | None = None,
) -> Config:
    """Reads `section` of a YAML file or dictionaries of it, applies `key.sub=value` overrides, validates once.

    Validated settings are returned as they are if there are no overrides. Overrides are relative to the section. Their
    values are YAML (`workers=2`, `inputs=[a.txt]`, `objective={kind: mlm}`).

    A file may have each key once. `look` finds problems of the places that settings name; it is called only after
    another problem, to report all at once.

    A file cannot grant trust, because it may come from someone else: `trust_remote_code` counts as an override only, or
    in a dictionary.
    """
    name, withdrawn = section, list[str]()
    if isinstance(overrides, str | Mapping):
        words = [overrides] if isinstance(overrides, str) else [f"{key}={value}" for key, value in overrides.items()]
        raise ConfigError(section, [f"overrides = {overrides!r}: must be a list, as {words}"])
    if isinstance(settings, model):
        if not overrides:
            return settings
        values = settings.model_dump(mode="json", exclude_unset=True)  # what was left to the shards stays so
    elif isinstance(settings, Mapping):
        values = _plain(settings)
        if section in values and section not in model.model_fields:
            raise ConfigError(name, [f"{section}: is the name of the section; give what is in it alone"])
    elif not isinstance(settings, str | Path):
        raise ConfigError(name, [f"{type(settings).__name__}: settings are a {model.__name__}, a dict or a path"])
    else:
        name, values = f"{settings} ({section})", _read_section(str(settings), section, model)
        withdrawn = _withdraw_trust(values)
    problems = apply_overrides(values, overrides, model.alternatives)
    decided = flat_keys(values)
    problems += [
        f"{key} = true: a file cannot grant trust. Remove the key from the file; if you trust the code of that model, "
        f"add {key}=true to the command"
        for key in withdrawn
        if key not in decided
    ]
    problems += refused_settings(values)
    config = None
    try:
        config = model.model_validate(values)
    except ValidationError as error:
        problems += describe(error, model, values)
    problems += [
        line
        for line in number_problems(values, model)
        # else validation has named it
        if not any(p.startswith(line.partition(":")[0].removesuffix("...")) for p in problems)
    ]
    if problems or config is None:
        raise ConfigError(name, problems + (look(values) if look else []))  # without problems, the command looks later
    return config


def apply_overrides(tree: dict[str, Any], words: Sequence[str], alternatives: Sequence[str] = ()) -> list[str]:
    """Apply each `a.b=value` to a tree of settings, in place; return the problems, one line each.

    The last of several for the same key counts. An override of one of the `alternatives`, of which a tree holds one,
    replaces the others.
    """
    problems = list(filter(None, (_override(tree, text) for text in words)))
    overridden = {text.partition("=")[0] for text in words}
    present = [key for key in alternatives if tree.get(key) is not None]
    chosen = [key for key in present if key in overridden]
    for key in present:
        if chosen and key not in overridden:
            get_logger().info("%s = %s replaces %s = %s of the file", chosen[0], tree[chosen[0]], key, tree[key])
            del tree[key]
    return problems


def _override(tree: dict[str, Any], text: str) -> str | None:
    """Apply one `a.b=value` in place; return its problem, if it has one."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        return f"override {text!r} is not of the form key=value (no spaces around =, quotes around a value with spaces)"
    if key[0] in _CURLY:
        return f"override {text!r} begins with a typographic quotation mark ({key[0]}); write '{text.strip(_CURLY)}'"
    try:
        parsed = read_yaml(value)
    except YamlError as error:
        names = '","'.join(part.strip(" '\"") for part in value.strip("[] ").split(","))
        quote = f"; put * and ? into two kinds of quotes: '{key}=[\"{names}\"]'" if {*"*?"} & {*value} else ""
        return f"override {key}: {shown_value(value)} is not YAML that can be used: {error}{quote}"
    *parents, last = key.split(".")
    if len(parents) >= _MAX_DEPTH:
        return f"override {shown_value(key)}: has {len(parents) + 1:,} parts; a key has at most {_MAX_DEPTH}"
    for parent in parents:
        if tree.get(parent) is None:  # absent, or a section whose lines are all comments
            tree[parent] = {}
        if not isinstance(tree[parent], dict):
            return f"override {key}: `{parent}` holds {shown_value(tree[parent])}, not a section with keys"
        tree = tree[parent]
    tree[last] = parsed
    return None


def _read_section(name: str, section: str, model: type[BaseModel]) -> dict[str, Any]:
    """The settings of a section of a file."""
    command = f"declutr prepare configs/cpu-small.yaml corpus.paths=[{name}]"
    advice = "" if name.endswith((".yaml", ".yml")) else f"; a config comes first, and a corpus behind it: {command}"
    try:
        tree = read_yaml_file(find_config(name))
    except YamlError as error:
        raise ConfigError(name, [f"is not YAML that can be used: {error}{advice}"]) from error
    except OSError as error:
        raise ConfigError(name, [f"cannot be read: {error.strerror}"]) from error
    if not isinstance(tree, dict) or not set(tree) <= set(SECTIONS):
        text, hint = "nothing" if tree is None else type(tree).__name__, advice
        if isinstance(tree, dict):
            text = str(sorted(map(str, tree)))
            odd = next(str(key) for key in tree if key not in SECTIONS)
            hint = suggest(odd, SECTIONS) if odd not in model.model_fields else f"; put the settings below `{section}:`"
        raise ConfigError(name, [f"top level must hold the sections {' and/or '.join(SECTIONS)}, found {text}{hint}"])
    if section not in tree:
        raise ConfigError(name, [f"has no section `{section}`, which this command reads; it has {sorted(tree)}"])
    settings: Any = {} if tree[section] is None else tree[section]
    if not isinstance(settings, dict):
        raise ConfigError(name, [f"{section} = {shown_value(settings)} must be a section with keys"])
    return settings


def _withdraw_trust(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Remove every `trust_remote_code` of a file that is not false, in place; return their dotted keys."""
    withdrawn = []
    for key, value in list(tree.items()):
        if isinstance(value, dict):
            withdrawn += _withdraw_trust(value, f"{prefix}{key}.")
        elif key == "trust_remote_code" and value is not False:
            del tree[key]
            withdrawn.append(prefix + key)
    return withdrawn


def first_problem(error: ValueError, model: type[BaseModel]) -> str:
    """The first problem of a validated file, in one line; the message of any other error."""
    if not isinstance(error, ValidationError):
        return str(error)
    problems = describe(error, model)
    return problems[0] + (f", and {len(problems) - 1} more" if len(problems) > 1 else "")


def describe(error: ValidationError, model: type[BaseModel], values: Any = None) -> list[str]:
    """One line per problem: dotted key, value, problem. With `values`, keys are named as they were written."""
    lines: dict[str, list[str]] = {}
    for item in error.errors():
        path = _written(item["loc"], values)
        key = ".".join(path) or "(whole section)"
        if item["type"] == "extra_forbidden":
            inside = flat_keys(item["input"]) if isinstance(item["input"], dict) else {}
            for rest in inside or [""]:
                full = [*path, *rest.split(".")] if rest else path
                hint = unknown_key(full, model) if len(lines) < _MOST_HINTS else ""
                if "known here" in hint and [f"unknown key{hint}"] in lines.values():  # said once
                    hint = ""
                lines[f"{'.'.join(full)}: "] = [f"unknown key{hint}"]
            continue
        if item["loc"][-1:] == ("[key]",) and not isinstance(item["input"], str):
            above = ".".join(str(part) for part in item["loc"][:-2])
            prefix, message = f"{above}: ", f"the key {shown_value(item['input'])} must be text; put it into quotes"
        elif item["type"] == "missing":
            prefix, message = f"{key}: ", "missing, and it has no default"
        elif item["type"].startswith("union_tag"):
            kind = item["ctx"]["discriminator"].strip("'")
            value = item["input"].get(kind) if isinstance(item["input"], dict) else item["input"]
            # pydantic gives them in a text alone
            expected = re.findall("'(.+?)'", item["ctx"].get("expected_tags", ""))
            choices = expected or choices_of(below((model,), path), kind)
            prefix = f"{key}.{kind} = {shown_value(value)}: "
            message = f"must be one of {', '.join(choices)}{suggest(str(value), choices)}" if choices else "missing"
        elif not item["loc"] or (item["type"] == "value_error" and isinstance(item["input"], dict)):  # of a section
            message = item["msg"].removeprefix("Value error, ")
            head = "" if not item["loc"] else f"{key}." if message.partition(" ")[0] in item["input"] else f"{key}: "
            lines |= {head + line: [] for line in message.splitlines()}
            continue
        else:
            prefix, message = f"{key} = {shown_value(item['input'])}: ", item["msg"].removeprefix("Value error, ")
            if item["type"] in ("model_type", "dict_type", "model_attributes_type"):
                keys = dict.fromkeys(name for section in below((model,), path) for name in section.model_fields)
                shown = ", ".join(f"{key}.{name}" for name in (list(keys) or ["NAME"])[:_MOST_NAMED])
                message = f"must be a section with settings: {shown}{', ...' if len(keys) > _MOST_NAMED else ''}"
            elif item["input"] is None:
                message = f"is empty. {message}"
            elif item["type"] == "literal_error":
                message += suggest(str(item["input"]), re.findall("'(.+?)'", item["ctx"]["expected"]))
            elif item["type"] == "string_type" and not isinstance(item["input"], list):  # `passage: ` is a section
                message += "; put it into quotes"
                message += "" if path[-1].isdigit() else f", on a command line into two kinds: {key}='\"...\"'"
            elif item["type"] in ("list_type", "tuple_type") and prefix in lines and not isinstance(item["input"], str):
                continue  # the message of the other kind says more
            elif item["type"] in ("list_type", "tuple_type") and isinstance(item["input"], str):
                text = re.sub(r"^\((.*)\)$", r"\1", item["input"])
                names = text.replace(",", '", "')
                # a shell expands * and ?, and YAML cuts at a comma
                message += f": write '[\"{names}\"]'" if {*"*?"} & {*text} else f": write [{text}]"
                message += f", or '[\"{text}\"]' for one name with a comma" if "," in text else ""
        lines.setdefault(prefix, []).append(message)
    return [prefix + "; or: ".join(dict.fromkeys(messages)) for prefix, messages in lines.items()]


def _written(loc: Sequence[int | str], values: Any) -> list[str]:
    """A place as the user writes it, without the names of alternatives that validation puts between keys."""
    if values is None:
        return [str(part) for part in loc]
    path: list[str] = []
    for number, part in enumerate(loc):
        last = number == len(loc) - 1
        in_list = isinstance(values, list) and isinstance(part, int) and part < len(values)
        inside = in_list or (isinstance(values, dict) and part in values)
        values = values[part] if inside else values
        if inside or (last and isinstance(values, dict)):
            path.append(str(part))
    return path


def config_yaml(config: Strict) -> str:
    """The resolved configuration as YAML, as every run writes it to its folder."""
    return str(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def flat_keys(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of settings with its nested keys joined by dots; an empty section is a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inside = isinstance(value, dict) and value
        flat |= flat_keys(value, f"{prefix}{key}.") if inside else {f"{prefix}{key}": value}
    return flat
