"""`declutr explore`."""

import argparse
import sys

from common.paths import path_argument


def run(arguments: list[str]) -> int:
    """Runs it until Ctrl-C; returns the exit status."""
    parser = argparse.ArgumentParser(prog="declutr explore", description="An index in a browser: search, and a map.")
    parser.add_argument("index", type=path_argument, help="folder that `declutr index` made")
    parser.add_argument("--model", help="the encoder, where it has moved since the embeddings were made")
    parser.add_argument(
        "--port", type=int, default=0, help="of 127.0.0.1, to which alone the page is served (a free one)"
    )
    parser.add_argument("--top", type=int, default=10, help="texts to find (10)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that the model brings along")
    given = parser.parse_args(arguments)
    if not 0 <= given.port <= 65_535:
        parser.error(f"--port {given.port}: 0 to 65535")
    if not 1 <= given.top <= 1_000:
        parser.error(f"--top {given.top}: 1 to 1000")
    from evaluation.embedding.config import EmbedError
    from evaluation.embedding.index import SearchIndex
    from evaluation.embedding.job import encoder_of
    from evaluation.encoders.loading import EncoderError
    from evaluation.explore.explorer import Explorer
    from evaluation.explore.server import ExploreServer

    try:
        index = SearchIndex(given.index)
        choice = index.facts.choice
        choice = choice.model_copy(update={"model": given.model}) if given.model else choice
        encoder = encoder_of(choice, trust_remote_code=given.trust_remote_code)
        explorer = Explorer(index, encoder, given.top)
    except (EmbedError, EncoderError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    try:
        server = ExploreServer(explorer, given.port)
    except OSError as error:
        sys.stderr.write(f"--port {given.port}: {error.strerror}; without --port a free one is taken\n")
        return 1
    with server:
        try:  # a reader of the line may answer with Ctrl-C before `print` has returned
            print(f"{server.url}  (for you alone: who has this address can read the texts; Ctrl-C ends it)", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
