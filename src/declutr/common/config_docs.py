"""Meanings of settings, taken from the docstrings of their fields: as comments in YAML and as tables in Markdown."""

import inspect
import textwrap
from collections.abc import Hashable, Iterator
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from declutr.common.suggestions import kinds_of, sections_of

_WIDTH = 100


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
    model: type[BaseModel], prefix: str, owner: str, default: Any, owners: dict[Hashable, str]
) -> Iterator[str]:
    """The table of a section, then the tables of the sections below it.

    Args:
        model: the section.
        prefix: its path, with a dot at the end.
        owner: the kind to which it belongs, empty if there is none.
        default: its value if it is not set.
        owners: owners of the rows and sections that the page has; they are named instead of repeated.
    """
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
    text: str = yaml.safe_dump(
        value, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=default_flow_style
    )
    return text.splitlines()


def _cell(text: str) -> str:
    """Text as a cell of a Markdown table."""
    return " ".join(text.replace("|", "\\|").split())
