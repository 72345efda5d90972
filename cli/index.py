"""`declutr index`."""

import argparse

from declutr.common.console.terminal import refused
from declutr.common.paths import path_argument


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="declutr index", description="Build an index for `declutr search`.")
    parser.add_argument("embeddings", type=path_argument, help="file of `declutr embed`, with its note next to it")
    parser.add_argument("--output", type=path_argument, required=True, help="folder to create")
    parser.add_argument("--kind", choices=("exact", "graph"), help="exact up to 20,000 embeddings, graph above")
    parser.add_argument("--source-field", help="field or column with the origin of a text (its file)")
    given = parser.parse_args(arguments)
    if not given.embeddings.is_file():
        return refused(f"{given.embeddings}: no such file; name a file that `declutr embed` has written")
    from declutr.evaluation.embedding.config import EmbedError
    from declutr.evaluation.embedding.index import build_index

    try:
        facts = build_index(given.embeddings, given.output, given.kind, given.source_field)
    except (EmbedError, OSError) as error:
        return refused(error)
    print(f"{given.output}: {facts.rows:,} texts, {facts.kind}")
    return 0
