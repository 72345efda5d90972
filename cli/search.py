"""`declutr search`."""

import argparse

from declutr.common.console.terminal import refused, shorten
from declutr.common.paths import path_argument

_SHOWN_CHARACTERS = 200


def run(arguments: list[str]) -> int:
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
