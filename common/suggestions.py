"""Which setting a person meant: the keys of a configuration, and the nearest of them to a key that is unknown."""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel


def meant(word: str, choices: Sequence[str]) -> str:
    """`; did you mean ...?` with the choice nearest to a word; nothing where none is near."""
    lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), list(lower), n=1)
    return f"; did you mean `{lower[near[0]]}`?" if near else ""


def unknown_key(path: Sequence[str], model: type[BaseModel], section: str = "") -> str:
    """What to write instead of an unknown key: the nearest key beside it, one of its name elsewhere, or all beside it.

    Args:
        path: the key and the branches above it.
        model: of the whole section.
        section: its name, with which a key may begin by mistake.
    """
    *parents, last = path
    everywhere = [".".join(key) for key in _keys((model,))]
    if section and path[0] == section:
        rest = ".".join(path[1:])
        beginning = f"; settings of `{section}` are named without it"
        return beginning + (f": `{rest}`" if rest in everywhere else meant(rest, everywhere))
    beside = [name for branch in _below((model,), parents) for name in branch.model_fields]
    same = [key for key in everywhere if key.rpartition(".")[2] == last]
    if same and len(same) <= 3:
        return f"; did you mean {' or '.join(f'`{key}`' for key in same)}?"
    elsewhere = {key.rpartition(".")[2]: key for key in reversed(everywhere)}
    if near := meant(last, beside):
        return near
    if near := meant(".".join(path), everywhere):
        return near
    if near := difflib.get_close_matches(last, list(elsewhere), n=1):
        return f"; did you mean `{elsewhere[near[0]]}`?"
    return f"; known here: {', '.join(dict.fromkeys(beside))}" if beside else ""


def _branches(annotation: Any) -> Iterator[type[BaseModel]]:
    """The branches that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _branches(part)


def _below(models: Sequence[type[BaseModel]], path: Sequence[str]) -> list[type[BaseModel]]:
    """The branches at a place of a configuration, as far down as it goes."""
    if not path:
        return list(models)
    fields = [model.model_fields[path[0]] for model in models if path[0] in model.model_fields]
    return _below([branch for field in fields for branch in _branches(field.annotation)], path[1:])


def _keys(models: Sequence[type[BaseModel]]) -> Iterator[tuple[str, ...]]:
    """Every key at and below these branches."""
    for model in models:
        for name, field in model.model_fields.items():
            yield (name,)
            for key in _keys(list(_branches(field.annotation))):
                yield (name, *key)
