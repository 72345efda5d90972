"""`declutr index` and `declutr search`."""

import argparse
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from declutr.common.console.terminal import refused, shorten
from declutr.common.paths import path_argument

if TYPE_CHECKING:
    from declutr.embedding.build import WeightChoice
    from declutr.embedding.index import IndexFacts, SearchIndex


def run_index(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="declutr index", description="Build an index for `declutr search`.")
    parser.add_argument("embeddings", type=path_argument, help="file of `declutr embed`, with its note next to it")
    parser.add_argument("--output", type=path_argument, required=True, help="folder to create")
    parser.add_argument("--source-field", help="field or column with the origin of a text (its file)")
    parser.add_argument("--dtype", choices=("float32", "int8"), help="type of the vectors (float32; int8 if they are)")
    parser.add_argument("--hybrid", action="store_true", help="store the words too: score = cosine + weight * words")
    parser.add_argument("--lexical", choices=("idf", "bm25"), help="score of the words of a hybrid index (idf)")
    parser.add_argument("--weight", type=_weight, help="weight of the words, 0 to 100 (1)")
    parser.add_argument("--pairs", type=path_argument, help="choose the weight on pairs of query and text, or id")
    parser.add_argument("--model", help="with --pairs: the encoder, if it has moved since the embeddings were made")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    parser.add_argument("--parquet", type=path_argument, help="file to write too: texts, vectors and a map of them")
    parser.add_argument("--open-addresses", action="store_true", help="read inputs at addresses in the file's note")
    options = parser.parse_args(arguments)
    if not options.embeddings.is_file():
        return refused(f"{options.embeddings}: no such file; name a file that `declutr embed` has written")
    for name in ("lexical", "weight", "pairs"):
        if getattr(options, name) is not None and not options.hybrid:
            return refused(f"--{name}: is for hybrid indexes; add --hybrid")
    if options.pairs and options.weight is not None:
        return refused(f"--weight {options.weight:g}: cannot be used with --pairs, which chooses the weight; omit one")
    from declutr.embedding.build import DEFAULT_WEIGHT, build_index, sentences
    from declutr.evaluation.retrieval.lexicon import LexicalKind

    choices: list[WeightChoice] = []
    weight = DEFAULT_WEIGHT if options.weight is None else options.weight
    lexical: LexicalKind | None = (options.lexical or "idf") if options.hybrid else None
    facts = build_index(
        options.embeddings,
        options.output,
        options.source_field,
        options.dtype,
        lexical,
        _chooser(options, choices) if options.pairs else weight,
        options.open_addresses,
        options.parquet,
    )
    lines = _described(facts, options.output)
    if options.parquet:
        import pyarrow.parquet as pq

        from declutr.embedding.build import SHARE

        share = float(pq.read_schema(options.parquet).metadata[SHARE])
        command = f"uvx embedding-atlas {shlex.quote(str(options.parquet))} --text text --x x --y y"
        lines.append(f"{options.parquet}: x and y have {100 * share:.1f}% of the variance; open it with: {command}")
    print(*lines, *(line for choice in choices for line in sentences(choice)), sep="\n")
    return 0


def _chooser(options: argparse.Namespace, choices: list["WeightChoice"]) -> Callable[["SearchIndex"], "WeightChoice"]:
    """Read pairs and encoder; return a function that chooses the weight of an index and appends the choice."""
    from declutr.embedding.build import choose_weight
    from declutr.embedding.units import read_note
    from declutr.evaluation.retrieval.pairs import read_pairs

    read_pairs(options.pairs)  # its problems need not wait for the encoder
    note = read_note(options.embeddings)
    from declutr.encoders.loading import encoder_of_index  # loads torch

    encoder = encoder_of_index(note.config.choice, options.model, trust_remote_code=options.trust_remote_code)

    def choose(index: "SearchIndex") -> "WeightChoice":
        choices.append(choose_weight(index, encoder, options.pairs))
        return choices[0]

    return choose


def _described(facts: "IndexFacts", folder: Path) -> list[str]:
    """Lines on a new index: texts, kind, type and bytes of the vectors, words."""
    from declutr.embedding.index import VECTORS
    from declutr.evaluation.retrieval.lexicon import NAMES

    num_bytes = (folder / VECTORS).stat().st_size
    vectors = f"vectors: {facts.dtype}, {num_bytes:,} bytes"
    if facts.dtype == "int8":
        vectors += f" (float32: {num_bytes + 3 * facts.rows * facts.size:,})"
        if facts.recall is not None:
            vectors += f"; a search finds {100 * facts.recall:.1f}% of the ten nearest by float32"
        else:
            vectors += "; recall not measured, because the embeddings are int8 or fewer than two"
    lines = [f"{folder}: {facts.rows:,} texts", vectors]
    if facts.hybrid:
        lines.append(f"words: {facts.hybrid.words:,}, {NAMES[facts.hybrid.kind]}, weight {facts.hybrid.weight:g}")
    return lines


def _weight(text: str) -> float:
    """Parse a weight of words."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text}: must be a number from 0 to 100")
    return value


_SHOWN_CHARACTERS = 200


def run_search(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="declutr search", description="Find the texts of an index nearest to a query."
    )
    parser.add_argument("index", type=path_argument, help="folder that `declutr index` made")
    parser.add_argument("query", nargs="+", help="one or more queries")
    parser.add_argument("--top", type=int, default=10, help="number of texts to show (10)")
    parser.add_argument("--weight", type=_weight, help="weight of the words of a hybrid index (the index's)")
    parser.add_argument("--model", help="the encoder, if it has moved since the embeddings were made")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    options = parser.parse_args(arguments)
    if options.top < 1:
        parser.error(f"--top {options.top}: must be at least 1")
    from declutr.embedding.index import SearchIndex
    from declutr.encoders.loading import encoder_of_index

    index = SearchIndex(options.index)
    if options.weight is not None:
        index.weigh(options.weight)
    encoder = encoder_of_index(index.facts.choice, options.model, trust_remote_code=options.trust_remote_code)
    answers = [(query, index.search(encoder, query, options.top)) for query in options.query]
    for query, hits in answers:
        if len(answers) > 1:
            print(f"# {query}")
        for hit in hits:
            text = " ".join(hit.text.split())
            parts = "" if hit.lexical is None else f" = {hit.cosine:.3f} + {index.weight:g} x {hit.lexical:.3f}"
            print(f"{hit.score:6.3f}{parts}  {hit.id or hit.record}  {shorten(text, _SHOWN_CHARACTERS)}")
    return 0
