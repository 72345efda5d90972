"""Overrides of settings, `a.b=value`, one a word of the command line."""

from collections.abc import Sequence
from typing import Any

from declutr.common.console.logs import get_logger
from declutr.common.credentials import shown_value
from declutr.common.yamlfile import MAX_DEPTH, YamlError, read_yaml


def apply_overrides(tree: dict[str, Any], words: Sequence[str], alternatives: Sequence[str] = ()) -> list[str]:
    """Apply each `a.b=value` to a tree of settings, in place; return the problems, one line each.

    An override of one of the `alternatives`, of which a tree holds one, replaces the others.
    """
    problems = [*_twice(words), *(problem for text in words if (problem := _apply(tree, text)))]
    overridden = {text.partition("=")[0] for text in words}
    present = [key for key in alternatives if tree.get(key) is not None]
    chosen = [key for key in present if key in overridden]
    for key in present:
        if chosen and key not in overridden:
            get_logger().info("%s = %s replaces %s = %s of the file", chosen[0], tree[chosen[0]], key, tree[key])
            del tree[key]
    return problems


def _twice(overrides: Sequence[str]) -> list[str]:
    """Problems of overrides that would silently undo an earlier one."""
    problems = []
    for number, text in enumerate(overrides):
        key, equals, _ = text.partition("=")
        for before in overrides[:number]:
            earlier = before.partition("=")[0]
            if equals and (earlier == key or earlier.startswith(f"{key}.")):
                problems.append(f"override {key}: {before!r} and then {text!r}, which undoes it; give one of them")
    return problems


def _apply(tree: dict[str, Any], text: str) -> str | None:
    """Apply one `a.b=value` in place; return its problem, if it has one."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        return f"override {text!r} is not of the form key=value (no spaces around =, quotes around a value with spaces)"
    try:
        parsed = read_yaml(value)
    except YamlError as error:
        quote = "; put a value that begins with * into quotes" if "*" in value else ""
        return f"override {key}: {shown_value(value)} is not YAML that can be used: {error}{quote}"
    *parents, last = key.split(".")
    if len(parents) >= MAX_DEPTH:
        return f"override {shown_value(key)}: has {len(parents) + 1:,} parts; a key has at most {MAX_DEPTH}"
    for parent in parents:
        if tree.get(parent) is None:  # absent, or a key without a value
            tree[parent] = {}
        if not isinstance(tree[parent], dict):
            return f"override {key}: `{parent}` holds {shown_value(tree[parent])}, not a section with keys"
        tree = tree[parent]
    tree[last] = parsed
    return None
