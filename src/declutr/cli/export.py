"""`declutr export`."""

import argparse
import sys
from typing import get_args

from declutr.common.paths import path_argument


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    from declutr.evaluation.export.inputs import ExportConfig, Target

    parser = argparse.ArgumentParser(
        prog="declutr export", description="Write a smaller or faster form of an encoder, and measure it."
    )
    parser.add_argument("model", help="as `declutr embed` takes it")
    parser.add_argument(
        "--to",
        choices=get_args(Target),
        required=True,
        help="a graph in float32; a graph in 8-bit integers; a table of token vectors (--corpus)",
    )
    parser.add_argument("--output", type=path_argument, required=True, help="folder to create")
    parser.add_argument(
        "--corpus", nargs="+", help="your texts: words of a table, ranges of integers; files, folders, globs"
    )
    parser.add_argument(
        "--text-field", action="append", help="field or column with the text (text); several are joined"
    )
    parser.add_argument("--stsb", type=path_argument, help="folder with sts-test.csv: scores before and after")
    parser.add_argument("--pairs", type=path_argument, help="queries with their texts: scores before and after")
    parser.add_argument("--max-tokens", type=int, help="most tokens of an input of a graph (encoder's limit)")
    parser.add_argument("--vocabulary-size", type=int, help="most tokens of a table (30,000)")
    parser.add_argument("--dimensions", type=int, help="most numbers of an embedding of a table (256)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    options = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    if len(names := options.get("text_field", [])) == 1:
        options["text_field"] = names[0]
    from declutr.common.config import validated
    from declutr.evaluation.export.inputs import read_inputs

    config = validated("export", ExportConfig, options)
    inputs = read_inputs(config)
    from declutr.evaluation.export.job import export
    from declutr.reproduction import provenance

    figures = export(config, inputs, provenance.facts(["declutr", *sys.argv[1:]]))
    parts = [f"{figures['bytes']:,} bytes", f"{figures['texts_per_second']['export']:,} texts a second"]
    parts.append(f"{figures['speedup']:.2f} times as fast as {figures['compared_with']} in float32")
    if figures["cosine"] is not None:
        same = figures.get("texts_of_ranges")
        parts.append(
            f"cosine {figures['cosine']:.4f}"
            + (f" ({same} of {figures['texts']} texts set its ranges)" if same else "")
        )
    if "stsb_after" in figures:
        parts.append(f"STS-B {figures['stsb_before']:.2f} before, {figures['stsb_after']:.2f} after")
    for name, scores in list(figures.get("pairs", {}).items())[:1]:
        parts.append(f"{name} {100 * scores['before']:.1f} before, {100 * scores['after']:.1f} after")
    print(f"{config.output}: {', '.join(parts)}")
    corpus = figures.get("corpus", {"skipped": {}, "cut": False})
    for reason, number in corpus["skipped"].items():
        print(f"skipped: {number:,} {reason}")
    if corpus["cut"]:
        print(f"corpus: cut after {corpus['read']:,} texts, which hardly changes ranges and frequent words")
    return 0
