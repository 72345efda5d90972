"""`declutr adapt`."""

import argparse

from declutr.cli import FORMATS
from declutr.common.paths import path_argument


def run_adapt(arguments: list[str]) -> int:
    """Run the command; return the exit status, which is 0 for every verdict."""
    parser = argparse.ArgumentParser(
        prog="declutr adapt",
        description="Fit an encoder to your documents without labels, and say whether it is better on documents that "
        "it has not seen (with --pairs, on such queries). Repeat the command to continue after a stop.",
    )
    parser.add_argument("encoder", metavar="ENCODER", help="folder or name of the encoder to start from")
    parser.add_argument("corpus", nargs="+", metavar="CORPUS", help="files, folders or globs of documents")
    parser.add_argument("--output", type=path_argument, required=True, help="folder of the result")
    parser.add_argument("--format", choices=FORMATS, help="format of the documents (auto)")
    parser.add_argument("--text-field", action="append", help="column with the text (text); several are joined")
    parser.add_argument("--pairs", help="own queries and answers (JSONL or CSV with `query` and `text`): they decide")
    parser.add_argument("--minutes", type=float, help="time for everything (30)")
    parser.add_argument(
        "--steps",
        type=int,
        help="steps of the training (ten passes, or as many as there is time for); 0: the closed form alone",
    )
    parser.add_argument("--stsb", metavar="FOLDER", help="STS-B's sts-test.csv: measures what was lost in general")
    parser.add_argument("--seed", type=int, help="of split, training and intervals (0)")
    parser.add_argument("--address", help="address of a Ray cluster")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the encoder")
    options = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    from declutr.common.console.logs import setup_logging

    setup_logging("adapt")
    from declutr.adaptation.job import REPORT, adapt

    result = adapt(**options)
    for row in result.rows:
        scores = ", ".join(f"{measure} {100 * score:.1f}" for measure, score in row.scores.items())
        print(f"{row.name:32s} {scores}")
    print(result.sentence)
    if result.general:
        print(result.general)
    if result.looks > 1:
        print(f"This is look {result.looks} at a test in this folder: its interval is too narrow")
    print(
        f"{options['output'] / REPORT}"
        + (f"; the encoder is {result.encoder}" if result.encoder else "; no encoder was written")
    )
    return 0
