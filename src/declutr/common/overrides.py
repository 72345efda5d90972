"""Overrides of settings, `a.b=value`, as a shell passes them: words, cut at spaces that no quotes protect."""

import shlex
from collections.abc import Sequence
from typing import Any

from declutr.common.console.logs import get_logger
from declutr.common.credentials import shown_value
from declutr.common.yamlfile import MAX_DEPTH, YamlError, read_yaml

_MOST_WORDS = 50
"""Most words that are read as one override."""


def apply_overrides(tree: dict[str, Any], words: Sequence[str], alternatives: Sequence[str] = ()) -> list[str]:
    """Apply each `a.b=value` to a tree of settings, in place; return the problems, one line each.

    An override of one of the `alternatives`, of which a tree holds one, replaces the others.
    """
    problems, overrides = _joined(words)
    problems += _twice(overrides)
    problems += [problem for text in overrides if (problem := _apply(tree, text))]
    _replace(tree, overrides, alternatives)
    return problems


def _replace(tree: dict[str, Any], overrides: Sequence[str], alternatives: Sequence[str]) -> None:
    """Remove the alternatives of overridden settings from a tree; log them."""
    overridden = {text.partition("=")[0] for text in overrides}
    given = [key for key in alternatives if tree.get(key) is not None]
    chosen = [key for key in given if key in overridden]
    for key in given:
        if chosen and key not in overridden:
            get_logger().info("%s = %s replaces %s = %s of the file", chosen[0], tree[chosen[0]], key, tree[key])
            del tree[key]


def _joined(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The problems of overrides that were cut at spaces, one for each, and all other overrides."""
    problems: list[str] = []
    others: list[str] = []
    start = 0
    while start < len(words):
        stop = start + _num_words(words[start:])
        text = " ".join(words[start:stop])
        key, _, value = text.partition("=")
        if stop - start == 1:
            others.append(text)
        elif value.strip()[:1] in ("[", "{"):
            problems.append(f"override {key}: the shell cuts it at its spaces; put it into quotes: {shlex.quote(text)}")
        else:
            problems.append(f"override {key.strip()}: write {key.strip()}={value.strip()} without spaces")
        start = stop
    return problems, others


def _num_words(words: Sequence[str]) -> int:
    """The number of words that form the first override: more than one if it was cut within brackets or at its =."""
    first, second = words[0], words[1] if len(words) > 1 else ""
    if first.endswith("=") and len(first) > 1 and second and "=" not in second:
        return 2
    if "=" not in first and second.startswith("="):
        return 2 if second != "=" else min(3, len(words))
    if first.partition("=")[2][:1] in ("[", "{"):
        for number in range(1, min(len(words), _MOST_WORDS) + 1):
            try:
                read_yaml(" ".join(words[:number]).partition("=")[2])
            except YamlError:
                continue
            return number
    return 1


def _twice(overrides: Sequence[str]) -> list[str]:
    """Problems of overrides that would silently undo an earlier one."""
    found = []
    for number, text in enumerate(overrides):
        key, equals, _ = text.partition("=")
        for before in overrides[:number]:
            earlier = before.partition("=")[0]
            if equals and (earlier == key or earlier.startswith(f"{key}.")):
                found.append(f"override {key}: {before!r} and then {text!r}, which undoes it; give one of them")
    return found


def _apply(tree: dict[str, Any], text: str) -> str | None:
    """Apply one `a.b=value` in place; return its problem, if it has one."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        return f"override {text!r} is not of the form key=value (a value with spaces needs quotes)"
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
