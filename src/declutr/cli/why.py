"""`declutr why`."""

import argparse

from declutr.common.paths import path_argument

_SHOWN_CHARACTERS = 160


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status, also 1 if a step's digest is not the one that the run logged."""
    parser = argparse.ArgumentParser(
        prog="declutr why", description="Show what a step reads, or the steps that read a document."
    )
    parser.add_argument("run", type=path_argument, help="folder of a run, or YAML file with a `train` section")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as data=FOLDER")
    parser.add_argument("--step", type=int, help="show the documents, spans, masks and views of this step")
    parser.add_argument("--document", help="show every step that reads a document: id, source or SOURCE:OFFSET")
    parser.add_argument("--full", action="store_true", help="show whole texts")
    options = parser.parse_intermixed_args(arguments)
    if options.step is None and options.document is None:
        parser.error("give --step, --document or both")
    from declutr.inspection.order import read_order

    order = read_order(options.run, options.overrides)
    if options.step is None:
        for line in order.document_lines(options.document):
            print(line)
        return 0
    from declutr.inspection.views import step_lines

    as_logged = True
    for line, right in step_lines(order, options.step, options.document, None if options.full else _SHOWN_CHARACTERS):
        as_logged &= right
        print(line)
    return int(not as_logged)
