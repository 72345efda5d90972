"""`declutr embed`."""

import argparse
import sys
from pathlib import Path


def run(arguments: list[str]) -> int:
    """Runs it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="declutr embed", description="Texts to embeddings.")
    parser.add_argument("model", help="exported folder, or a name that transformers knows")
    parser.add_argument("input", type=Path, help=".jsonl, .parquet, or one text a line")
    parser.add_argument("--output", type=Path, required=True, help=".npy or .parquet")
    parser.add_argument("--text-field", default="text", help="field or column of the text (text)")
    given = parser.parse_args(arguments)
    from evaluation.embed import EmbedError, embed_file
    from evaluation.encoder import EncoderError

    try:
        number = embed_file(given.model, given.input, given.output, given.text_field)
    except (EmbedError, EncoderError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    print(f"{given.output}: {number} embeddings")
    return 0
