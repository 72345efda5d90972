"""Keys, kinds and meanings (docstrings of fields) of settings, as YAML comments and Markdown tables."""

import inspect
import math
import textwrap
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from declutr.common.errors import OTHER_WORDS, nearest

_WIDTH = 100
MAX_NUMBER = 10**12  # largest magnitude of a number
MIN_NUMBER = 1e-37  # smallest magnitude of a number that is not 0; smaller ones are 0 in single precision
MAX_SEED = 2**63 - 1  # largest seed
_SHOWN_CHARACTERS = 40


def annotated_yaml(config: BaseModel) -> str:
    """Format a configuration as YAML with the meaning of each setting as a comment above it."""
    return "\n".join(_annotated(config)) + "\n"


def _annotated(config: BaseModel) -> Iterator[str]:
    values = config.model_dump(mode="json")
    for name, field in type(config).model_fields.items():
        section = getattr(config, name)
        is_section = isinstance(section, BaseModel)
        meaning = _meaning(field, _summary(type(section)) if is_section else "")
        yield from (f"# {line}" for line in textwrap.wrap(meaning, _WIDTH))
        if is_section and values[name]:
            yield f"{name}:"
            yield from (f"  {line}" for line in _annotated(section))
        else:
            in_one_line = isinstance(values[name], list | dict)
            yield from _dumped({name: values[name]}, default_flow_style=None if in_one_line else False)


def settings_tables(model: type[BaseModel], name: str) -> Iterator[str]:
    """Yield the lines of a Markdown section `name` with one table for each section of a configuration."""
    yield from [f"## {name}", _summary(model), ""]
    yield from _tables(model, "", "", PydanticUndefined, {})


def _tables(
    model: type[BaseModel],  # the section
    prefix: str,  # its path, with a dot at the end
    owner: str,  # the kind to which it belongs, empty if there is none
    default: Any,  # its value if it is not set
    # owners of the rows and sections that the page has; they are named instead of repeated.
    owners: dict[Hashable, str],
) -> Iterator[str]:
    """The table of a section, then the tables of the sections below it."""
    rows, below = [], []
    again: dict[str, dict[str, None]] = {}
    for name, field in model.model_fields.items():
        if name == "kind" and _kind(model):
            continue  # the heading has it
        value = getattr(default, name) if isinstance(default, model) else field.get_default(call_default_factory=True)
        models = list(sections_of(field.annotation))
        kinds = [get_origin(kind) or kind for kind in kinds_of(field.annotation)]
        path = f"{prefix}{name}" + (".NAME" if kinds[0] is dict else ".N" if models and list in kinds else "")
        plain = str in kinds and kinds[0] is not dict  # a text does instead of the sections
        if not models or value is None or plain:
            row = f"| `{prefix}{name}` | {_default_cell(value)} | {_cell(_meaning(field, ''))} |"
            if row in owners:
                again.setdefault(owners[row], {})[path] = None
            else:
                owners[row] = owner
                rows.append(row)
        for section in models:
            place = path.rpartition(".NAME.")[2]
            if (section, place) in owners:
                again.setdefault(owners[section, place], {})[place] = None
            else:
                owners[section, place] = owner
                own = plain or len(models) > 1 or not field.description
                below.append((section, path, value, _summary(section) if own else field.description))
    if rows:
        yield from ["| setting | default | meaning |", "| --- | --- | --- |", *rows, ""]
    for first, paths in again.items():
        yield f"As {f'for kind `{first}`' if first else f'above, after `{prefix}`'}: `{'`, `'.join(paths)}`."
    if again:
        yield ""
    for section, path, value, summary in below:
        kind = _kind(section)
        default_kind = " The default." if kind and isinstance(value, section) else ""
        yield from [f"### `{path}`" + (f", kind `{kind}`" if kind else ""), f"{summary}{default_kind}", ""]
        yield from _tables(section, f"{path}.", kind or owner, value, owners)


def _summary(model: type[BaseModel]) -> str:
    """First paragraph of a model's docstring, in one line."""
    return " ".join(inspect.cleandoc(model.__doc__ or "").partition("\n\n")[0].split())


def _kind(model: type[BaseModel]) -> str | None:
    """The value of `kind` that selects this model; None if it has no `kind` or allows several values."""
    field = model.model_fields.get("kind")
    kinds = get_args(field.annotation) if field else ()
    return str(kinds[0]) if len(kinds) == 1 else None


def _meaning(field: FieldInfo, otherwise: str) -> str:
    """The docstring of a setting, or another text where it has none, with its choices if they are not in it."""
    literals = [kind for kind in kinds_of(field.annotation) if get_origin(kind) is Literal]
    choices = [kind for model in sections_of(field.annotation) if (kind := _kind(model))] or [
        str(choice) for literal in literals for choice in get_args(literal)
    ]
    text = field.description or otherwise
    explained = len(choices) < 2 or all(f"{choice}:" in text for choice in choices)
    return text if explained else f"{text} One of {', '.join(choices)}.".strip()


def _default_cell(default: Any) -> str:
    """A default as a cell of a table: YAML in one line."""
    if default is PydanticUndefined:
        return "required"
    text = " ".join(_dumped(to_jsonable_python(default), default_flow_style=True))
    return f"`{_cell(text.removesuffix(' ...'))}`"  # YAML ends a lone value with ...


def _dumped(value: Any, default_flow_style: bool | None) -> list[str]:
    # 10,000: YAML would break long texts
    text: str = yaml.safe_dump(
        value, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=default_flow_style
    )
    return text.splitlines()


def _cell(text: str) -> str:
    """Text as a cell of a Markdown table."""
    return " ".join(text.replace("|", "\\|").split())


def unknown_key(
    path: Sequence[str],  # the key and the sections above it
    model: type[BaseModel],  # model of the whole section
) -> str:
    """Advice on an unknown key: the nearest of its section, one of its name elsewhere, or all keys of its section."""
    *parents, last = path
    own_word = OTHER_WORDS.get(last, last)
    sections = below((model,), parents)
    if kinds := choices_of([section for section in sections if last in section.model_fields], "kind"):
        key, choice = ".".join(parents), " or ".join(dict.fromkeys(kinds))
        return f"; it needs {key}.kind = {choice}; set that, remove the key, or write '{key}={{kind: KIND, ...}}'"
    beside = {name: ".".join([*parents, name]) for owner in sections for name in owner.model_fields}
    everywhere = list(dict.fromkeys(".".join(key) for key in _keys((model,))))
    same = [key for key in everywhere if f".{key}".endswith(f".{own_word}")]
    same = [beside[own_word]] if own_word in beside else [key for key in same if ".NAME." not in key] or same
    if 0 < len(same) <= 3:
        return f"; did you mean {' or '.join(f'`{key}`' for key in same)}?"
    # reversed: of equal names the first one stays
    elsewhere = {key.rpartition(".")[2]: key for key in reversed(everywhere)}
    # a key of the same or like parents would be near by them alone, whatever its name
    other_places = {key: key for key in everywhere if nearest(last, [key.rpartition(".")[2]])}
    for word, choices in ((last, beside), (".".join(path), other_places), (last, elsewhere if beside else {})):
        if near := nearest(word, choices):
            return f"; did you mean `{choices[near]}`?"
    return f"; known here: {', '.join(beside)}" if beside else unknown_key(parents, model)


def choices_of(sections: Sequence[type[BaseModel]], name: str) -> list[str]:
    """The names that a field such as `kind` may hold, over all sections that have it."""
    fields = [section.model_fields[name] for section in sections if name in section.model_fields]
    return [str(choice) for field in fields for choice in get_args(field.annotation)]


def kinds_of(annotation: Any) -> Iterator[Any]:
    """The types that a field may hold."""
    yield annotation
    for part in get_args(annotation):
        yield from kinds_of(part)


def sections_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a field may hold."""
    for kind in kinds_of(annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind


def below(models: Sequence[type[BaseModel]], path: Sequence[str]) -> list[type[BaseModel]]:
    """The sections at a place of a configuration, as far down as it goes; numbers are places in a list."""
    path = [part for part in path if not part.isdigit()]
    if not path:
        return list(models)
    sections = []
    for field in (model.model_fields[path[0]] for model in models if path[0] in model.model_fields):
        has_names = get_origin(field.annotation) is dict  # sections by name
        if not has_names or len(path) > 1:
            sections += below(list(sections_of(field.annotation)), path[2 if has_names else 1 :])
    return sections


def _keys(models: Sequence[type[BaseModel]]) -> Iterator[tuple[str, ...]]:
    """Every key at and below these sections; NAME stands for the names that the user chooses."""
    for model in models:
        for name, field in model.model_fields.items():
            yield (name,)
            for key in _keys(list(sections_of(field.annotation))):
                yield (name, "NAME", *key) if get_origin(field.annotation) is dict else (name, *key)


def number_problems(values: Any, model: type[BaseModel]) -> Iterator[str]:
    """Problems of numbers, lines that start with key and value: validation takes yes for 1, and any magnitude."""
    for path, value in _leaves(values):
        *parents, last = [part for part in path if not part.isdigit()] or [""]
        fields = [section.model_fields[last] for section in below((model,), parents) if last in section.model_fields]
        kinds = {kind for field in fields for kind in kinds_of(field.annotation) if kind in (bool, float, int, str)}
        if problem := _number_problem(value, kinds, last == "seed"):
            text = repr(value) if len(repr(value)) <= _SHOWN_CHARACTERS else f"{repr(value)[:_SHOWN_CHARACTERS]}..."
            yield f"{'.'.join(path)} = {text}: {problem}"


def _leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value that is neither a mapping nor a list, and its place."""
    if isinstance(values, dict | list):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from _leaves(value, (*path, str(key)))
    else:
        yield path, values


def _number_problem(value: Any, kinds: set[type], is_seed: bool) -> str | None:
    """The problem of a value if it is a number, or stands for one of these kinds."""
    if isinstance(value, bool | str):
        if not kinds & {int, float} or type(value) in kinds:
            return None
        if isinstance(value, bool):
            return "a number is needed (YAML takes yes, no, on, off for true and false)"
        try:
            value = float(value)  # as validation reads 1e308, which is a text in YAML 1.1
        except ValueError:
            return None
    if not isinstance(value, int | float):
        return None
    limit = MAX_SEED if is_seed else MAX_NUMBER
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if abs(value) > limit:
        return f"must be at most {limit:,}" if value > 0 else f"must be at least -{limit:,}"
    if 0 < abs(value) < MIN_NUMBER:
        return f"must be 0 or at least {MIN_NUMBER:g}, because it is 0 in single precision"
    return None
