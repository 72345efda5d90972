"""Console command `declutr`. A sub-command and its libraries are imported when it runs."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from declutr.common.console.terminal import answered, config_parser, refused, shown
from declutr.common.errors import DeclutrError, UsageError, refused_argument, suggest
from declutr.common.paths import check_there
from declutr.common.relay import end_at_signals, relay
from declutr.common.stores.address import OBJECT_STORES

_COMMANDS = {
    "prepare": ("CONFIG [key=value ...]: a corpus to Arrow shards", "pipeline.prepare"),
    "train": ("CONFIG [key=value ...]: shards to a sentence encoder", "trainer.train"),
    "verify-gradients": ("CONFIG [key=value ...]: compare gradients across numbers of processes", "cli.runs"),
    "embed": ("MODEL INPUT... --output OUT: texts to embeddings", "cli.encoders"),
    "adapt": (
        "ENCODER CORPUS... --output DIR: fit an encoder to your documents, and say whether it is better",
        "cli.encoders",
    ),
    "index": ("EMBEDDINGS --output INDEX: embeddings to an index", "cli.encoders"),
    "search": ("INDEX QUERY: the nearest texts of an index", "cli.encoders"),
    "export": (
        "MODEL --to onnx|onnx-int8|static --output DIR: a smaller or faster form of an encoder, and its measurement",
        "cli.encoders",
    ),
    "doctor": ("[CONFIG] [--path ...]: check that this machine can run a training", "doctor"),
    "evaluate": (
        "[ENCODER ...] --data DIR | --pairs FILE | --mteb TASKS: score encoders, or fetch and check the data",
        "cli.evaluate",
    ),
    "inspect": ("PATH: describe shards, an encoder or a run, whose checkpoints are verified", "cli.runs"),
    "reproduce": (
        "[ITEM] [--scale tiny] [--plan]: run a table or figure of a paper, and compare with its numbers",
        "cli.runs",
    ),
    "why": (
        "RUN --step N | --document ID: the documents, spans and masks of a step, or the steps that read a document",
        "cli.runs",
    ),
    "report": ("SHARDS | RUN [RUN ...] [--output FOLDER]: write a page on a prepared corpus, or on runs", "cli.runs"),
    "copy": ("FROM TO: a folder or a run to or from an object store, with checksums", "common.stores.copies"),
    "demo": ("[key=value ...]: train an encoder on a corpus found on every machine; measure, search", "cli.demo"),
}  # what follows the name of each command with its meaning, and the module of its function `main` or `run_COMMAND`
_READ_FOLDERS = ("index", "export", "evaluate", "inspect", "why", "report", "reproduce")
_RELAYED = ("prepare", "train", "adapt", "demo", "reproduce")
"""Commands that continue after a stop; their Ray processes must outlive a signal until the work is saved."""
_CONFIGURED = ("prepare", "train", "verify-gradients", "doctor")
_INPUTS = {"data": "; run `prepare` with this output", "corpus.paths": ""}
"""Settings that name files or folders which must exist, and what to do if they do not."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `declutr COMMAND ...`; return the exit status, 1 if the user has something to fix."""
    # closed, as by some daemons
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115, PTH123
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print("usage: declutr COMMAND ... | --version\n")
        for name, (what, _) in _COMMANDS.items():
            print(f"  declutr {name} {what}")
        return 0
    if command == "--version":
        print(f"declutr {version('declutr-ray')}")
        return 0
    if problem := _problem(command, rest):
        return refused(problem)
    if argv is None:  # a call in Python must not fork its process
        if command in _RELAYED:
            relay()
        end_at_signals()
    if command in ("prepare", "train") and {"-h", "--help"} & set(rest):  # before the command's libraries are loaded
        config_parser(command).parse_args(["--help"])
    module = _COMMANDS[command][1]
    function = f"run_{command.replace('-', '_')}" if module.startswith("cli.") else "main"
    with shown():
        run: Callable[[list[str]], int] = getattr(import_module(f"declutr.{module}"), function)
        return answered(run)(rest)


def _problem(command: str, rest: list[str]) -> str | None:
    """The reason why a command line is refused before anything is imported."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return "declutr: the current folder was deleted; change to another"
    if command not in _COMMANDS:
        near = suggest(command, [*_COMMANDS, "--version", "--help"])
        return f"declutr: there is no command {command!r}{near}\ndeclutr --help lists all"
    # before a secret reaches a log, a plan or a manifest
    if problem := next(filter(None, map(refused_argument, rest)), None):
        return f"declutr {command}: {problem}"
    # `embed` reads inputs at addresses, a query may be any text, and a document has the name that it was read by
    read = rest if command in _READ_FOLDERS else rest[:1] if command in ("embed", "search") else []
    places = [place for place, before in zip(read, ["", *read], strict=False) if before != "--document"]
    if address := next((place for place in places if place.startswith(OBJECT_STORES)), None):
        return f"declutr {command} reads folders: declutr copy {address} FOLDER, then name that folder"
    if command in _CONFIGURED and rest and not rest[0].startswith("-"):
        try:
            _check_config(rest)
        except DeclutrError as error:
            return str(error)
    return None


def _check_config(rest: list[str]) -> None:
    """Checks that the config exists and, where a path is written plainly, what it reads."""
    from declutr.common.config import find_config

    find_config(rest[0])
    for key, _, value in (word.partition("=") for word in rest[1:]):
        # A quoted name may hold a comma. What is not written plainly is left to whoever reads the settings.
        if key not in _INPUTS or set("{'\"") & set(value) or (key == "corpus.paths" and value[:1] != "["):
            continue
        for path in (part.strip() for part in value.strip("[]").split(",")):
            try:
                check_there([path])
            except UsageError as error:
                raise UsageError(f"{key} = {error}{_INPUTS[key]}") from error


def settings_page() -> str:
    """The page docs/reference/settings.md, generated from the configuration models: `make settings`."""
    from declutr.common.config_docs import settings_tables
    from declutr.pipeline.config import PipelineConfig
    from declutr.trainer.config import TrainConfig

    head = """# Settings

Generated from the docstrings of the configuration models by `make settings`; do not edit.

A config file has a `prepare` section, a `train` section, or both. On the command line a setting is written without its
section: `declutr train CONFIG optim.lr=3e-5`. `--print-config` prints the settings of one command with their values.
"""
    tables = (*settings_tables(PipelineConfig, "prepare"), *settings_tables(TrainConfig, "train"))
    return "\n".join([head, *tables]).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.exit(main())
