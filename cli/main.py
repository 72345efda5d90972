"""The console command `declutr`. Each sub-command is imported when it runs, and imports what it needs then."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from common.config import ConfigError
from common.console.terminal import shown
from common.credentials import refused_argument
from common.paths import PathError
from common.suggestions import meant

_COMMANDS = {
    "prepare": ("CONFIG [key=value ...]: a corpus to Arrow shards", "pipeline.prepare:main"),
    "train": ("CONFIG [key=value ...]: shards to a sentence encoder", "trainer.train:main"),
    "verify-gradients": (
        "CONFIG [key=value ...]: is the gradient the same however it is computed?",
        "cli.verify_gradients:run",
    ),
    "embed": ("MODEL INPUT... --output OUT: texts to embeddings", "cli.embed:run"),
    "index": ("EMBEDDINGS --output INDEX: embeddings to an index", "cli.index:run"),
    "search": ("INDEX QUERY: the nearest texts of an index", "cli.search:run"),
    "explore": ("INDEX: search and a map of an index, in a browser", "cli.explore:run"),
    "export-onnx": ("MODEL --output FOLDER: an encoder as ONNX", "cli.export_onnx:run"),
    "doctor": (
        "[CONFIG] [--address ...] [--path ...]: is this machine or cluster fit for a run?",
        "doctor.examination:main",
    ),
    "evaluate": (
        "[ENCODER ...] --data DIR: encoders on SentEval's tasks; the data, fetched and checked",
        "cli.evaluate:run",
    ),
    "inspect": ("PATH: what shards, a run or a checkpoint hold", "cli.inspect:run"),
    "checkpoints": (
        "RUN [--json]: every checkpoint, verified, and why it is kept",
        "cli.checkpoints:run",
    ),
    "report": ("SHARDS [--output FOLDER]: a page on a prepared corpus", "cli.report:run"),
    "push": ("FOLDER ADDRESS: a folder to an object store, whole, with checksums", "common.stores.folders:push"),
    "pull": ("ADDRESS FOLDER: a folder or a run from there", "common.stores.folders:pull"),
    "demo": ("the whole path on a corpus that every machine has", "cli.demo:run"),
}

_READ_FOLDERS = ("index", "explore", "export-onnx", "evaluate", "inspect", "checkpoints", "report")
_STORES = ("s3://", "gs://", "gcs://")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `declutr COMMAND ...`; returns the exit status, 1 when the user has something to mend."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print("usage: declutr COMMAND ... | --version\n")
        for name, (what, _) in _COMMANDS.items():
            print(f"  declutr {name} {what}")
        return 0
    if arguments[0] == "--version":
        print(f"declutr {version('declutr-ray')}")
        return 0
    if arguments[0] not in _COMMANDS:
        near = meant(arguments[0], list(_COMMANDS))
        print(f"declutr: there is no command {arguments[0]!r}{near}\ndeclutr --help lists all", file=sys.stderr)
        return 1
    command, *given = arguments
    for problem in filter(None, map(refused_argument, given)):
        print(f"declutr {command}: {problem}", file=sys.stderr)
        return 1
    read = given if command in _READ_FOLDERS else given[:1] if command in ("embed", "search") else []
    if address := next((one for one in read if one.startswith(_STORES)), None):
        print(f"declutr {command} reads folders: declutr pull {address} FOLDER, then name that folder", file=sys.stderr)
        return 1
    module, _, function = _COMMANDS[arguments[0]][1].partition(":")
    with shown():
        try:
            status: int = getattr(import_module(module), function)(arguments[1:])
        except (OSError, ConfigError, PathError) as error:
            print(f"declutr {command}: {error}", file=sys.stderr)
            return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
