"""Console command `declutr`. A sub-command and its libraries are imported when it runs."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version

from declutr.common.console.terminal import answered, config_parser, shown
from declutr.common.credentials import refused_argument
from declutr.common.relay import end_at_signals, relay
from declutr.common.suggestions import suggest

_COMMANDS = {
    "prepare": ("CONFIG [key=value ...]: a corpus to Arrow shards", "declutr.pipeline.prepare:main"),
    "train": ("CONFIG [key=value ...]: shards to a sentence encoder", "declutr.trainer.train:main"),
    "verify-gradients": (
        "CONFIG [key=value ...]: compare gradients across numbers of processes",
        "declutr.cli.verify_gradients:run",
    ),
    "embed": ("MODEL INPUT... --output OUT: texts to embeddings", "declutr.cli.embed:run_embed"),
    "adapt": (
        "ENCODER CORPUS... --output DIR: fit an encoder to your documents, and say whether it is better",
        "declutr.cli.adapt:run_adapt",
    ),
    "index": ("EMBEDDINGS --output INDEX: embeddings to an index", "declutr.cli.search:run_index"),
    "search": ("INDEX QUERY: the nearest texts of an index", "declutr.cli.search:run_search"),
    "export": (
        "MODEL --to onnx|onnx-int8|static --output DIR: a smaller or faster form of an encoder, and its measurement",
        "declutr.cli.export:run",
    ),
    "doctor": ("[CONFIG] [--path ...]: check that this machine can run a training", "declutr.doctor:main"),
    "evaluate": (
        "[ENCODER ...] --data DIR: score encoders on SentEval's tasks; fetch and check the data",
        "declutr.cli.evaluate:run",
    ),
    "inspect": (
        "PATH [--json]: describe shards, an encoder or a run, whose checkpoints are verified",
        "declutr.cli.inspect:run_inspect",
    ),
    "reproduce": (
        "[ITEM] [--scale tiny] [--plan]: run a table or figure of a paper, and compare with its numbers",
        "declutr.cli.reproduce:run",
    ),
    "why": (
        "RUN --step N | --document ID: the documents, spans and masks of a step, or the steps that read a document",
        "declutr.cli.why:run",
    ),
    "report": (
        "SHARDS | RUN [RUN ...] [--output FOLDER]: write a page on a prepared corpus, or on runs",
        "declutr.cli.inspect:run_report",
    ),
    "copy": (
        "FROM TO: a folder or a run to or from an object store, with checksums",
        "declutr.common.stores.copies:main",
    ),
    "demo": ("[key=value ...]: prepare, train and measure on a corpus found on every machine", "declutr.cli.demo:run"),
}

_REPLACED: dict[str, str] = {
    "checkpoints": "declutr inspect RUN [--json] lists and verifies them",
    "publish": "hf upload OWNER/NAME RUN/export sends an export to the hub; it holds no path of this machine. Fill the "
    "field license of its README.md first",
    "whiten": "declutr adapt ENCODER CORPUS --steps 0 --output DIR tries the closed form alone",
    "explore": "declutr index EMBEDDINGS --output INDEX --parquet MAP.parquet, then "
    "uvx embedding-atlas MAP.parquet --text text --x x --y y",
    "push": "declutr copy FOLDER ADDRESS",
    "pull": "declutr copy ADDRESS FOLDER",
}
"""What to type instead of a command that earlier versions had."""
_REPLACED_OPTIONS: dict[tuple[str, str], str] = {
    ("train", "--fork"): "train a new run from the export of the old one: run=NEW encoder.pretrained=RUN/export (and "
    "encoder.from_config=null if the config has one)",
    ("evaluate", "--follow"): "declutr evaluate RUN scores each checkpoint of a run",
    ("evaluate", "--once"): "declutr evaluate RUN scores each checkpoint of a run, and ends",
    ("evaluate", "--every-seconds"): "declutr evaluate RUN scores each checkpoint of a run, and ends",
    ("doctor", "--address"): "`ray status` lists the nodes and what is free; run `declutr doctor CONFIG` on each node",
    ("index", "--kind"): "every search compares all vectors; omit it",
}
"""What to type instead of an option that earlier versions of a command had."""

_READ_FOLDERS = ("index", "export", "evaluate", "inspect", "why", "report", "reproduce")
_RELAYED = ("prepare", "train", "adapt", "demo", "reproduce")
"""Commands that continue after a stop; their Ray processes must outlive a signal until the work is saved."""
_STORES = ("s3://", "gs://", "gcs://")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `declutr COMMAND ...`; return the exit status, 1 if the user has something to fix."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print("usage: declutr COMMAND ... | --version\n")
        for name, (what, _) in _COMMANDS.items():
            print(f"  declutr {name} {what}")
        return 0
    if arguments[0] == "--version":
        print(f"declutr {version('declutr-ray')}")
        return 0
    if arguments[0] in _REPLACED:
        print(f"declutr: there is no command {arguments[0]!r} any more: {_REPLACED[arguments[0]]}", file=sys.stderr)
        return 1
    if arguments[0] not in _COMMANDS:
        near = suggest(arguments[0], list(_COMMANDS))
        print(f"declutr: there is no command {arguments[0]!r}{near}\ndeclutr --help lists all", file=sys.stderr)
        return 1
    command, *rest = arguments
    for option in rest:
        if instead := _REPLACED_OPTIONS.get((command, option.partition("=")[0])):
            print(f"declutr {command}: there is no option {option} any more: {instead}", file=sys.stderr)
            return 1
    for problem in filter(None, map(refused_argument, rest)):
        print(f"declutr {command}: {problem}", file=sys.stderr)
        return 1
    read = rest if command in _READ_FOLDERS else rest[:1] if command in ("embed", "search") else []
    if address := next((argument for argument in read if argument.startswith(_STORES)), None):
        print(f"declutr {command} reads folders: declutr copy {address} FOLDER, then name that folder", file=sys.stderr)
        return 1
    if argv is None:
        if command in _RELAYED:
            relay()
        end_at_signals()
    if command in ("prepare", "train") and {"-h", "--help"} & set(rest):  # before the command's libraries are loaded
        config_parser(command).parse_args(["--help"])
    module, _, function = _COMMANDS[command][1].partition(":")
    with shown():
        run: Callable[[list[str]], int] = getattr(import_module(module), function)
        return answered(run)(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
