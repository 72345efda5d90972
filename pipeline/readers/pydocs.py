"""A corpus that exists on every machine: the English documentation of Python and of the installed packages.

A document is a module's docstring with those of its public classes and functions. Modules are parsed with `ast` and
never imported. `pydoc_data.topics`, the language reference, adds one document a topic.
"""

import ast
import hashlib
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from declutr.common.config import Strict
from declutr.pipeline.readers.corpus import Document, Part, Record, failed

_SKIPPED_FOLDERS = re.compile(
    "__pycache__|test_.*|tests?|testing|(site|dist)-packages|idlelib|lib2to3|_?vendor(ed)?|third_?party|extern(als)?"
    "|node_modules"
)
_TRIPLE_QUOTED = re.compile(rb'"""(.*?)"""|' + rb"'''(.*?)'''", re.DOTALL)
# Modules with less text than this between triple quotes are skipped, because parsing them would dominate the work.
MIN_DOCUMENTATION_BYTES = 512

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class PythonDocs(Strict):
    """Docstrings of the standard library and installed packages, and `help()` topics."""

    kind: Literal["python_docs"]


def python_parts() -> list[Part]:
    """One part a module, ordered by a hash of its name, so that any stretch of the list is a fair sample."""
    standard = Path(sysconfig.get_path("stdlib"))
    roots = {standard: "stdlib"}
    for scheme in ("purelib", "platlib"):
        roots.setdefault(Path(sysconfig.get_path(scheme)), "packages")
    parts = [_part(root, prefix, path) for root, prefix in roots.items() for path in _modules(root)]
    topics = standard / "pydoc_data" / "topics.py"
    parts = [part.model_copy(update={"format": "topics"}) if Path(part.path) == topics else part for part in parts]
    # By name, packages would lie together.
    return sorted(parts, key=lambda part: hashlib.blake2b(part.source.encode()).digest())


def _modules(root: Path) -> Iterator[Path]:
    """Python files under a folder, without tests and vendored code."""
    for folder, children, names in os.walk(root):
        # In place: os.walk goes into these.
        children[:] = sorted(child for child in children if not _SKIPPED_FOLDERS.fullmatch(child))
        for name in names:
            is_test = name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py"
            path = Path(folder, name)
            if name.endswith(".py") and not is_test and path.is_file():  # not a link to nothing, as editors leave
                yield path


def _part(root: Path, prefix: str, path: Path) -> Part:
    size = path.stat().st_size
    source = f"{prefix}/{path.relative_to(root).as_posix()}"
    return Part(format="python", path=str(path), source=source, start=0, stop=size, num_bytes=size, weight=size)


def read_python(part: Part) -> Iterator[Record]:
    """The documentation of one module, nothing if it has almost none; or the topics of `help()` in order."""
    try:
        code = Path(part.path).read_bytes()
    except OSError as error:
        yield failed("unreadable", part.source, 0, str(error))
        return
    quoted = (match.end() - match.start() for match in _TRIPLE_QUOTED.finditer(code))
    if part.format == "python" and sum(quoted) < MIN_DOCUMENTATION_BYTES:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in installed modules
            tree = ast.parse(code)
    # Deep nesting is a MemoryError, too.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield failed("invalid_python", part.source, 0, f"{type(error).__name__}: {error}")
        return
    if part.format == "python":
        pieces = [ast.get_docstring(tree), *_described(tree, "")]
        if text := "\n\n".join(piece for piece in pieces if piece):
            yield Document(text.encode("utf-8", "replace").decode(), part.source, 0)
    else:
        tables = [node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)]
        texts = [value.value for table in tables for value in table.values if isinstance(value, ast.Constant)]
        for ordinal, topic in enumerate(texts):
            yield Document(str(topic), part.source, ordinal)


def _described(parent: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    """`name(arguments)` and docstring of every documented public definition, including methods."""
    for node in parent.body:
        if isinstance(node, _Definition) and not node.name.startswith("_"):
            name = prefix + node.name
            if docstring := ast.get_docstring(node):
                signature = name if isinstance(node, ast.ClassDef) else f"{name}({_arguments(node.args)})"
                yield f"{signature}\n{docstring}"
            if isinstance(node, ast.ClassDef):
                yield from _described(node, f"{name}.")


def _arguments(arguments: ast.arguments) -> str:
    """Argument names without defaults and annotations, which are code and not English."""
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return ", ".join(argument.arg for argument in parameters if argument.arg not in ("self", "cls"))
