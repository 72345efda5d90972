"""Bound names that say nothing: a bare participle or pronoun. `make check` runs this; it ends with 1 if there are more.

    python tests/names.py [FILE ...]      (default: tracked files outside tests)

A name says what its value is: `duplicates`, `message`, `options`, `row`. Functions, parameters, attributes, loop
variables, imports under another name and patterns of `match` count; a trailing or leading underscore changes nothing.
"""

import ast
import subprocess
import sys
from pathlib import Path

LIMIT = 50
BARE = {
    "asked", "each", "found", "given", "held", "known", "least", "made", "meant", "mine", "most", "named", "one",
    "others", "ours", "said", "shown", "some", "taken", "theirs", "told", "wanted",
}  # fmt: skip


def bound_names(tree):
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.alias(asname=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno


def bare_names(path):
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return [f"{path}:{line}: {name}" for name, line in bound_names(tree) if name.strip("_") in BARE]


def main():
    tracked = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split()
    files = sys.argv[1:] or [name for name in tracked if not name.startswith("tests/") and Path(name).exists()]
    places = [place for name in files for place in bare_names(Path(name))]
    if len(places) > LIMIT:
        sys.exit("\n".join([*places, f"{len(places)} names that say nothing, at most {LIMIT}: name what the value is"]))


if __name__ == "__main__":
    main()
