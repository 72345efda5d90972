"""Suggestions for mistyped settings: the known key nearest to an unknown one."""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

_LONGEST_WORD = 100  # of a name that may be mistyped; difflib's time grows with the square
_OTHER_WORDS = {
    "batch_size": "batch_documents",
    "bfloat16": "bf16",
    "dataset": "corpus",
    "dtype": "precision",
    "eval_steps": "validation.every_steps",
    "float32": "fp32",
    "gpu": "cuda",
    "gradient_accumulation_steps": "microbatch_tokens",
    "inputs": "paths",
    "learning_rate": "lr",
    "max_length": "max_tokens",
    "max_seq_length": "max_tokens",
    "max_steps": "steps",
    "model": "pretrained",
    "model_name": "pretrained",
    "model_name_or_path": "pretrained",
    "num_epochs": "epochs",
    "num_gpus": "num_workers",
    "num_train_epochs": "epochs",
    "save_steps": "checkpoint.every_steps",
    "test_size": "validation_fraction",
    "text_column": "text_field",
    "warmup_steps": "warmup_ratio",
}
"""The names that other libraries have for settings and values, and ours."""
_REMOVED = {"straggler_factor": "no line names a slow worker any more; remove it"}
"""What to do with settings that earlier versions had."""


def suggest(word: str, choices: Sequence[str]) -> str:
    """`; did you mean ...?` with the choice nearest to a word; empty if none is near."""
    lower = {choice.lower(): choice for choice in choices}
    if (own_word := _OTHER_WORDS.get(word.lower())) in choices:
        return f"; did you mean `{own_word}`?"
    near = difflib.get_close_matches(word.lower(), list(lower), n=1) if len(word) <= _LONGEST_WORD else []
    return f"; did you mean `{lower[near[0]]}`?" if near else ""


def unknown_key(
    path: Sequence[str], model: type[BaseModel], section: str = "", other_sections: Mapping[str, Any] | None = None
) -> str:
    """Advice on an unknown key: the nearest key of its section, one of its name elsewhere, or all keys of its section.

    Args:
        path: the key and the sections above it.
        model: model of the whole section.
        section: name of the section, with which a key may start by mistake.
        other_sections: settings of the file's other sections, by the section's name.
    """
    *parents, last = path
    if last in _REMOVED:
        return f"; {_REMOVED[last]}"
    everywhere = list(dict.fromkeys(".".join(key) for key in _keys((model,))))
    if path[0] == section and len(path) > 1:
        rest = ".".join(path[1:])
        hint = f": write `{rest}`" if rest in everywhere else suggest(rest, everywhere)
        return f"; settings of the section `{section}` are named without it{hint}"
    for other, settings in (other_sections or {}).items():
        is_other_key = isinstance(settings, dict) and path[0] in settings and path[0] not in model.model_fields
        if is_other_key or path[0] == other:
            return f"; it is a setting of the section `{other}`, which only `declutr {other}` reads"
    sections = below((model,), parents)
    if kinds := [kind for owner in sections if last in owner.model_fields for kind in _choices(owner, "kind")]:
        key = ".".join([*parents, "kind"])
        return f"; it needs {key} = {' or '.join(dict.fromkeys(kinds))}; set that or remove the key"
    beside = {name: ".".join([*parents, name]) for owner in sections for name in owner.model_fields}
    own_word = _OTHER_WORDS.get(last, last)
    if own_word in beside:
        return f"; did you mean `{beside[own_word]}`?"
    same = [key for key in everywhere if f".{key}".endswith(f".{own_word}")]
    same = [key for key in same if ".NAME." not in key] or same
    if 0 < len(same) <= 3:
        return f"; did you mean {' or '.join(f'`{key}`' for key in same)}?"
    elsewhere = {key.rpartition(".")[2]: key for key in reversed(everywhere)}
    # a key of the same parents would be near by them alone, whatever its name
    other_places = {key: key for key in everywhere if key not in beside.values() and key != ".".join(parents)}
    for word, choices in ((last, beside), (".".join(path), other_places), (last, elsewhere)):
        if len(word) <= _LONGEST_WORD and (near := difflib.get_close_matches(word, choices, n=1)):
            return f"; did you mean `{choices[near[0]]}`?"
    return f"; known here: {', '.join(beside)}" if beside else unknown_key(parents, model, section, other_sections)


def choices_of(path: Sequence[str], model: type[BaseModel]) -> list[str]:
    """The names that a key such as `kind` may hold, over all sections that have it; arguments as for `unknown_key`."""
    return [choice for section in below((model,), path[:-1]) for choice in _choices(section, path[-1])]


def _choices(section: type[BaseModel], name: str) -> list[str]:
    """The names that a field of a section may hold; none without that field."""
    field = section.model_fields.get(name)
    return [str(choice) for choice in get_args(field.annotation)] if field else []


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
        has_names = _is_named(field.annotation)
        if not has_names or len(path) > 1:
            sections += below(list(sections_of(field.annotation)), path[2 if has_names else 1 :])
    return sections


def _keys(models: Sequence[type[BaseModel]]) -> Iterator[tuple[str, ...]]:
    """Every key at and below these sections; NAME stands for the names that the user chooses."""
    for model in models:
        for name, field in model.model_fields.items():
            yield (name,)
            for key in _keys(list(sections_of(field.annotation))):
                yield (name, "NAME", *key) if _is_named(field.annotation) else (name, *key)


def _is_named(annotation: Any) -> bool:
    """True if a field holds sections by name."""
    return get_origin(annotation) is dict


MAX_NUMBER = 10**12
"""Largest magnitude of a number."""
MIN_NUMBER = 1e-37
"""Smallest magnitude of a number that is not 0; smaller ones are 0 in single precision."""
MAX_SEED = 2**63 - 1
"""Largest seed."""
_SHOWN_CHARACTERS = 40


def number_problems(values: Any, model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Problems of the numbers in a tree of settings, one line each, which starts with key and value.

    Validation alone takes yes and no for 1 and 0, and any magnitude.
    """
    if isinstance(values, dict):
        for key, value in values.items():
            yield from number_problems(value, model, (*path, str(key)))
        return
    if isinstance(values, list):
        for number, value in enumerate(values):
            yield from number_problems(value, model, (*path, str(number)))
        return
    if (problem := _problem(values, model, path)) is not None:
        text = repr(values) if len(repr(values)) <= _SHOWN_CHARACTERS else f"{repr(values)[:_SHOWN_CHARACTERS]}..."
        yield f"{'.'.join(path)} = {text}: {problem}"


def _problem(value: Any, model: type[BaseModel], path: tuple[str, ...]) -> str | None:
    """The problem of one value."""
    if isinstance(value, (bool, str)):
        kinds = set(_kinds(model, path))
        if not kinds & {int, float} or kinds & ({bool} if isinstance(value, bool) else {str}):
            return None
        if isinstance(value, bool):
            return "a number is needed (YAML takes yes, no, on, off for true and false)"
        try:
            value = float(value)  # as validation reads 1e308, which is a text in YAML 1.1
        except ValueError:
            return None
    if not isinstance(value, (int, float)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    limit = MAX_SEED if path[-1] == "seed" else MAX_NUMBER
    if abs(value) > limit:
        return f"must be at most {limit:,}" if value > 0 else f"must be at least -{limit:,}"
    if 0 < abs(value) < MIN_NUMBER:
        return f"must be 0 or at least {MIN_NUMBER:g}, because it is 0 in single precision"
    return None


def _kinds(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[Any]:
    """The types that a key may hold; an entry of a list has those of the list."""
    while path and path[-1].isdigit():
        path = path[:-1]
    for section in below((model,), path[:-1]):
        if path[-1] in section.model_fields:
            yield from kinds_of(section.model_fields[path[-1]].annotation)
