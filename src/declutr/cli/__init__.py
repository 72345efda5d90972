"""Sub-commands: each function parses the arguments of one, and imports what the command needs."""

from typing import Any

from declutr.common.console.terminal import Parser as PlainParser

# The choices of options stand here too, because `--help` must not wait for numpy and pyarrow;
# tests/test_repository.py compares them with the settings that they choose.
FORMATS = ("auto", "auto_text_file", "jsonl", "json", "text", "text_file", "parquet", "arrow", "csv", "tsv", "wet")
POOLINGS = ("mean", "cls", "max", "mean_without_cls")
PRECISIONS = ("auto", "fp32", "bf16")
ROLES = ("query", "document")
TARGETS = ("onnx", "onnx-int8", "static")

_SHARED: dict[str, dict[str, Any]] = {
    "--address": {"help": "address of a Ray cluster"},
    "--allow-unchecked": {"action": "store_true", "help": "accept data other than the published ones; they are marked"},
    "--pooling": {"choices": POOLINGS, "help": "pooling of the encoder, instead of its own"},
    "--precision": {
        "choices": PRECISIONS,
        "default": "auto",
        "help": "bf16 by default on GPUs, and on CPUs with units for it; fp32 is exact",
    },
    "--query-prompt": {"metavar": "TEXT", "help": "text before every query (the encoder's own)"},
    "--document-prompt": {"metavar": "TEXT", "help": "text before every text to be searched (the encoder's own)"},
    "--text-field": {"action": "append", "help": "field or column with the text (text); several are joined"},
    "--trust-remote-code": {"action": "store_true", "help": "run Python code that comes with the encoder"},
    "config": {"help": "YAML file with a `train` section"},
    "overrides": {"nargs": "*", "metavar": "key=value", "help": "settings of the `train` section to change"},
}  # arguments of several commands


class Parser(PlainParser):
    """The parser of a command: its name, and a description for `--help`."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"declutr {command}", description=description)

    def shared(self, *names: str) -> None:
        """Add arguments of several commands."""
        for name in names:
            self.add_argument(name, **_SHARED[name])
