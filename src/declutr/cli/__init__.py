"""Sub-commands, one file each: `run(arguments)` parses the arguments and imports what the command needs."""

# The choices of options stand here too, because `--help` must not wait for pydantic, numpy and pyarrow;
# tests/test_repository.py compares them with the settings that they choose.
FORMATS = ("auto", "jsonl", "text", "text_file", "parquet", "arrow", "csv", "tsv")
POOLINGS = ("mean", "cls", "max", "mean_without_cls")
PRECISIONS = ("auto", "fp32", "bf16")
