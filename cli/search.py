"""`declutr index`, `search` and `explore`."""

import argparse
import os

from declutr.common.console.terminal import refused, shorten
from declutr.common.paths import path_argument


def run_index(arguments: list[str]) -> int:
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


_SHOWN_CHARACTERS = 200


def run_search(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="declutr search", description="Find the texts of an index nearest to a query."
    )
    parser.add_argument("index", type=path_argument, help="folder that `declutr index` made")
    parser.add_argument("query", nargs="+", help="one or more queries")
    parser.add_argument("--top", type=int, default=10, help="number of texts to show (10)")
    parser.add_argument("--model", help="the encoder, if it has moved since the embeddings were made")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    given = parser.parse_args(arguments)
    from declutr.evaluation.embedding.config import EmbedError
    from declutr.evaluation.embedding.index import SearchIndex
    from declutr.evaluation.encoders.loading import EncoderError, encoder_of_index

    try:
        index = SearchIndex(given.index)
        encoder = encoder_of_index(index.facts.choice, given.model, trust_remote_code=given.trust_remote_code)
        found = [(query, index.search(encoder, query, given.top)) for query in given.query]
    except (EmbedError, EncoderError) as error:
        return refused(error)
    for query, hits in found:
        if len(found) > 1:
            print(f"# {query}")
        for hit in hits:
            text = " ".join(hit.text.split())
            print(f"{hit.score:6.3f}  {hit.id or hit.row}  {shorten(text, _SHOWN_CHARACTERS)}")
    return 0


def run_explore(arguments: list[str]) -> int:
    """Run the command until Ctrl-C; return the exit status."""
    parser = argparse.ArgumentParser(prog="declutr explore", description="Search and map an index in a browser.")
    parser.add_argument("index", type=path_argument, help="folder that `declutr index` made")
    parser.add_argument("--model", help="the encoder, if it has moved since the embeddings were made")
    parser.add_argument(
        "--port", type=int, default=0, help="port on 127.0.0.1; other machines cannot connect (a free port)"
    )
    parser.add_argument("--top", type=int, default=10, help="number of texts to find (10)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    given = parser.parse_args(arguments)
    if not 0 <= given.port <= 65_535:
        parser.error(f"--port {given.port}: must be 0 to 65535")
    if not 1 <= given.top <= 1_000:
        parser.error(f"--top {given.top}: must be 1 to 1000")
    from declutr.evaluation.embedding.config import EmbedError
    from declutr.evaluation.embedding.index import SearchIndex
    from declutr.evaluation.encoders.protocol import EncoderError
    from declutr.evaluation.explore.explorer import Explorer
    from declutr.evaluation.explore.server import ExploreServer, listen

    try:
        index = SearchIndex(given.index)
    except EmbedError as error:
        return refused(error)
    try:
        listening = listen(given.port)
    except OSError as error:
        return refused(f"--port {given.port}: {os.strerror(error.errno or 0)}; omit --port to use a free port")
    from declutr.evaluation.encoders.loading import encoder_of_index  # loads torch, which no taken port waits for

    try:
        encoder = encoder_of_index(index.facts.choice, given.model, trust_remote_code=given.trust_remote_code)
        server = ExploreServer(Explorer(index, encoder, given.top), listening)
    except (EmbedError, EncoderError) as error:
        listening.close()
        return refused(error)
    with server:
        try:  # a reader of the line may press Ctrl-C before `print` has returned
            print(f"{server.url}  (private: anyone with this address can read the texts; Ctrl-C stops)", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
