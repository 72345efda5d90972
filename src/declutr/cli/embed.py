"""`declutr embed`."""

import argparse

from declutr.cli import FORMATS, POOLINGS, PRECISIONS
from declutr.common.paths import path_argument


def run_embed(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="declutr embed", description="Embed texts. Run again to continue after a stop."
    )
    parser.add_argument("model", help="folder, name, file of word vectors, hashed-words:SIZE or untrained:NAME")
    parser.add_argument("inputs", nargs="+", help="files, folders, globs: text lines, JSONL, Parquet, ..., compressed")
    parser.add_argument(
        "--output", type=path_argument, required=True, help=".npy or .parquet file; its note is written to OUTPUT.json"
    )
    parser.add_argument(
        "--text-field", action="append", help="field or column with the text (text); several are joined"
    )
    parser.add_argument("--id-field", help="field or column with an id to write next to each embedding (.parquet)")
    parser.add_argument("--format", choices=FORMATS, default="auto", help="format of the inputs (auto)")
    parser.add_argument("--normalise", action="store_true", help="scale embeddings to length 1")
    parser.add_argument("--dimensions", type=int, help="keep only the first N numbers (before --normalise)")
    parser.add_argument("--dtype", choices=("float32", "float16", "int8"), default="float32")
    parser.add_argument(
        "--max-tokens", type=int, help="most tokens of an input, special ones included (encoder's limit)"
    )
    parser.add_argument("--long-texts", choices=("cut", "windows"), default="cut", help="windows: averaged by tokens")
    parser.add_argument("--pooling", choices=POOLINGS, help="overrides the encoder's pooling")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="auto", help="bf16 on GPUs by default; fp32 is exact"
    )
    parser.add_argument("--skip-bad", action="store_true", help="skip and count unreadable records (.parquet)")
    parser.add_argument("--workers", type=int, help="Ray workers; 0: this process alone (by the size of the input)")
    parser.add_argument("--unit-mib", type=float, help="MiB of input per unit of work (1)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    options = vars(parser.parse_args(arguments))
    names = options.pop("text_field") or ["text"]
    options["text_field"] = names if len(names) > 1 else names[0]
    from declutr.common.console.logs import setup_logging
    from declutr.embedding.job import embed

    setup_logging("embed")
    note = embed(**options)
    for reason, number in note.skipped.items():
        print(f"skipped: {number:,} {reason}")
    print(f"{options['output']}: {note.rows:,} embeddings of {note.size} numbers ({options['dtype']})")
    return 0
