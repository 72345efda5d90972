"""Strict YAML reader for files that may come from someone else: plain data, nothing overridden silently.

PyYAML's safe loader accepts more than a configuration should hold. A key given twice silently keeps its last value,
`010` is 8, `1:30` is 90, and a few lines of aliases stand for billions of values.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from declutr.common.storage import read_regular

MAX_BYTES = 2**17  # which take two seconds
MAX_VALUES = 20_000  # largest number of keys and values in a document, aliases expanded
MAX_DEPTH = 64  # largest number of mappings and lists in each other
_MAX_BITS = 1024  # more than a float has; Python refuses to print numbers of 4,300 digits


class YamlError(ValueError):
    """A text that is not YAML, or refused YAML: one line that names the place."""


class _Strict(yaml.SafeLoader):
    """The safe loader without surprises: dates stay text; tags, ambiguous numbers and repeated keys are errors."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Composes a node; refuses explicit tags, and too deep nodes before the rest is read."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None) is not None:
            message = f"the tag {event.tag} is refused: plain values only"
            raise yaml.composer.ComposerError(None, None, message, event.start_mark)
        self._depth += 1
        if self._depth > MAX_DEPTH + 1:  # a value is in at most that many
            raise YamlError(f"is nested too deeply: at most {MAX_DEPTH} mappings and lists in each other")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_number(self, node: yaml.ScalarNode) -> float:
        """A number in base 10 unless it starts with 0x, 0o or 0b, and never in base 60."""
        text = str(self.construct_scalar(node))
        whole = node.tag.endswith(":int")
        value: int | float = self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise ValueError(f"it has more than {_MAX_BITS:,} bits")
        digits = text.replace("_", "").lstrip("+-")
        if ":" in digits or (digits[:1] == "0" and digits.isdigit() and len(digits) > 1):
            message = f"{text} is ambiguous, YAML reads it as {value}; write that, or quote it"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        return value

    def construct_unique(self, node: yaml.MappingNode) -> Iterator[Any]:
        """A mapping without repeated keys. A key may replace one that came from a merge (`<<`)."""
        seen: dict[str, Any] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    message = f"{key.value!r} is given twice, first in line {seen[key.value].line + 1}"
                    raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
                seen[key.value] = key.start_mark
        yield from self.construct_yaml_map(node)


_AS_TEXT = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
# a table of its own: `safe_dump` and other loaders use that of the base
_Strict.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _AS_TEXT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Strict.add_constructor("tag:yaml.org,2002:int", _Strict.construct_number)
_Strict.add_constructor("tag:yaml.org,2002:float", _Strict.construct_number)
_Strict.add_constructor("tag:yaml.org,2002:map", _Strict.construct_unique)


def read_yaml(text: str) -> Any:
    """Reads a YAML document of plain data with at most `MAX_VALUES` values; refuses tags, repeated keys and loops."""
    if len(text) > MAX_BYTES:
        raise YamlError(f"is longer than {MAX_BYTES:,} characters")
    try:
        loader = _Strict(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_large(node)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise YamlError(_yaml_problem(error, text)) from error
    except yaml.reader.ReaderError as error:
        place = f"line {text[: error.position].count(chr(10)) + 1}"
        raise YamlError(f"holds the character U+{error.character:04X}, which YAML does not allow ({place})") from error
    except YamlError:
        raise
    except ValueError as error:  # raised by Python for numbers such as `0x_` or of 5,000 digits
        raise YamlError(f"holds a number that cannot be read: {str(error).partition(';')[0]}") from error


def read_yaml_file(path: Path) -> Any:
    """Like `read_yaml`, for a file in UTF-8."""
    raw = read_regular(path, MAX_BYTES + 1)  # one more tells a longer file
    if len(raw) > MAX_BYTES:
        raise YamlError(f"is longer than {MAX_BYTES:,} bytes")
    try:
        return read_yaml(raw.decode("utf-8-sig"))  # an editor may have put a byte order mark before it
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise YamlError(f"is not UTF-8 text: byte {raw[error.start]:#04x} in line {line}; save it as UTF-8") from error


def _refuse_large(node: yaml.Node) -> None:
    """Counts the values of a document, aliases expanded."""
    waiting, total = [node], 0
    while waiting:
        node, total = waiting.pop(), total + 1
        if total > MAX_VALUES:
            raise YamlError(
                f"holds more than {MAX_VALUES:,} values, aliases expanded, or an anchor that contains itself"
            )
        if isinstance(node, yaml.CollectionNode):
            for entry in node.value:
                waiting += entry if isinstance(entry, tuple) else (entry,)


def _yaml_problem(error: yaml.MarkedYAMLError, text: str) -> str:
    """The problem and its place, in one line."""
    problem, mark = error.problem or error.context or "", error.problem_mark or error.context_mark
    if problem == "but found another document":
        problem = "it holds more than one document"
    elif "'\\t'" in problem:
        problem = "a tab; indent with spaces"
    elif mark and problem.startswith(("mapping values are not", "expected <block end>", "could not find expected ':'")):
        problem += "; keys of a section are indented alike, and a value with a colon stands in quotes"
    elif "end of stream" in problem or "stream end>" in problem:
        problem += "; a quotation mark or a bracket may not be closed"
    where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark and "\n" in text.strip() else ""
    return f"{problem}{where}"
