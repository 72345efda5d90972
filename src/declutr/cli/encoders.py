"""`declutr embed`, `index`, `search`, `adapt` and `export`: commands that use an encoder, or make one from another."""

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

from declutr.cli import FORMATS, ROLES, TARGETS, Parser
from declutr.common.console.logs import setup_logging
from declutr.common.console.terminal import excerpt, shorten
from declutr.common.errors import ConfigError, UsageError
from declutr.common.hub import looks_like_a_path
from declutr.common.paths import check_there, expand, listed, path_argument
from declutr.embedding import check_embeddings, check_index

_SHOWN_CHARACTERS = 200


def _options(parser: Parser, arguments: list[str], join_fields: bool = True) -> dict[str, Any]:
    """The options that were set, by name; a single --text-field becomes a text, unless `join_fields` is False."""
    given = vars(parser.parse_intermixed_args(arguments))  # CORPUS, which may be absent, also behind options
    options = {name: value for name, value in given.items() if value is not None}
    if join_fields and len(options.get("text_field", ())) == 1:
        options["text_field"] = options["text_field"][0]
    return options


def _path(encoder: str) -> str | None:
    """The name of an encoder if it can only be a path."""
    return encoder if looks_like_a_path(encoder) and ":" not in encoder else None


@contextmanager
def _in_options() -> Iterator[None]:
    """Name settings in errors as the options of the command: `--unit-mib 0.0` for `unit_mib = 0.0`."""
    try:
        yield
    except ConfigError as error:
        lines = [re.sub(r"^(\w+) = ", lambda m: f"--{m[1].replace('_', '-')} ", line) for line in error.problems]
        raise UsageError("\n".join(lines)) from error


def run_embed(arguments: list[str]) -> int:
    """Embed texts; return the exit status."""
    parser = Parser("embed", "Embed texts. Run again to continue after a stop.")
    parser.add_argument("model", help="folder, name, hashed-words:SIZE, words:NAME or untrained:NAME")
    parser.add_argument("inputs", nargs="+", help="files, folders, globs, in their order: text lines, JSONL, Parquet")
    parser.add_argument("--output", type=path_argument, required=True, help=".npy or .parquet file; its note is written"
                        " to OUTPUT.json")  # fmt: skip
    parser.add_argument("--id-field", help="field or column with an id (text, whole number) of each row (.parquet)")
    parser.add_argument("--format", choices=FORMATS, default="auto", help="format of the inputs (auto)")
    parser.add_argument("--normalise", action="store_true", help="scale embeddings to length 1")
    parser.add_argument("--dimensions", type=int, help="keep only the first N numbers (before --normalise)")
    parser.add_argument("--dtype", choices=("float32", "float16", "int8"), default="float32")
    parser.add_argument("--max-tokens", type=int, help="most tokens of an input, with special ones (encoder's limit)")
    parser.add_argument("--long-texts", choices=("cut", "windows"), default="cut", help="windows: their mean by tokens")
    parser.add_argument("--passages", action="store_true", help="a row for each passage that fits the encoder, with its"
                        " place: reads long texts whole (.parquet)")  # fmt: skip
    parser.add_argument("--headings", action="store_true", help="put the headings above a passage before it")
    parser.add_argument("--skip-bad", action="store_true", help="skip and count unreadable records (.parquet)")
    parser.add_argument("--workers", type=int, help="Ray workers; 0: this process alone (by the size of the input)")
    parser.add_argument("--unit-mib", type=float, help="MiB of input per unit of work (1)")
    parser.add_argument("--role", choices=ROLES, help="use of the texts, which decides the encoder's prompt before them"
                        " (document, if it has prompts)")  # fmt: skip
    parser.shared("--query-prompt", "--document-prompt", "--text-field", "--pooling", "--precision",
                  "--trust-remote-code")  # fmt: skip
    options = _options(parser, arguments)
    check_there([_path(options["model"]), *options["inputs"]])
    from declutr.embedding.job import embed  # loads pyarrow, for which nothing wrong waits

    setup_logging("embed")
    with _in_options():
        note = embed(**options)
    for reason, number in note.skipped.items():
        print(f"skipped: {number:,} {reason}")
    if note.lost:
        print(f"lost, wholly or in part: {excerpt(note.lost)}")
    if note.texts_empty:
        by_line = options["format"] == "auto" and 20 * note.texts_empty > note.rows
        hint = "; each line of a .txt is a text, with --format auto_text_file each file" if by_line else ""
        print(f"empty texts: {note.texts_empty:,}{hint}")
    rows = f"{note.rows:,} {'passages' if note.config.passages else 'embeddings'}"
    print(f"{options['output']}: {rows} of {note.size} numbers ({options['dtype']})")
    if note.tokens:
        print(f"tokens read: {note.tokens_read:,} of {note.tokens:,} ({100 * note.tokens_read / note.tokens:.1f}%), "
              f"texts cut: {note.texts_cut:,}")  # fmt: skip
    return 0


def run_index(arguments: list[str]) -> int:
    """Build an index; return the exit status."""
    parser = Parser("index", "Build an index for `declutr search`.")
    parser.add_argument("embeddings", type=path_argument, help="file of `declutr embed`, with its note next to it")
    parser.add_argument("--output", type=path_argument, required=True, help="folder to create")
    parser.add_argument("--source-field", help="field or column with the origin of a text (its file)")
    parser.add_argument("--dtype", choices=("float32", "int8"), help="type of the vectors (float32; int8 if they are)")
    parser.add_argument("--hybrid", action="store_true", help="store the words too: score = cosine + weight * words")
    parser.add_argument("--lexical", choices=("idf", "bm25"), help="score of the words of a hybrid index (idf)")
    parser.add_argument("--weight", type=float, help="weight of the words, 0 to 100 (1)")
    parser.add_argument("--pairs", type=path_argument, help="file of queries with a text or id; chooses the weight")
    parser.add_argument("--model", help="with --pairs: the encoder, if it has moved since the embeddings were made")
    parser.add_argument("--parquet", type=path_argument, help="file to write too: texts, vectors and a map of them")
    parser.add_argument("--open-addresses", action="store_true", help="read inputs at addresses in the file's note")
    parser.shared("--trust-remote-code")
    options = parser.parse_args(arguments)
    check_embeddings(options.embeddings)
    from declutr.embedding.build import SHARE, index
    from declutr.embedding.index import VECTORS
    from declutr.embedding.weights import sentences
    from declutr.evaluation.retrieval.lexicon import NAMES

    facts, choice = index(**vars(options))
    num_bytes = (options.output / VECTORS).stat().st_size
    vectors = f"vectors: {facts.dtype}, {num_bytes:,} bytes"
    if facts.dtype == "int8":
        vectors += f" (float32: {num_bytes + 3 * facts.rows * facts.size:,})"
    lines = [f"{options.output}: {facts.rows:,} {'passages' if facts.passages else 'texts'}", vectors]
    if sentence := facts.sentence():
        lines.append(sentence + ("" if facts.passages else "; `declutr embed --passages` reads them whole"))
    if facts.hybrid:
        lines.append(f"words: {facts.hybrid.words:,}, {NAMES[facts.hybrid.kind]}, weight {facts.hybrid.weight:g}")
    if options.parquet:
        import pyarrow.parquet as pq

        share = float(pq.read_schema(options.parquet).metadata[SHARE])
        command = f"uvx embedding-atlas {shlex.quote(str(options.parquet))} --text text --x x --y y"
        lines.append(f"{options.parquet}: x and y have {100 * share:.1f}% of the variance; open it with: {command}")
    print(*lines, *(sentences(choice) if choice else ()), sep="\n")
    return 0


def run_search(arguments: list[str]) -> int:
    """Search an index; return the exit status."""
    parser = Parser("search", "Find the texts of an index nearest to a query.")
    parser.add_argument("index", type=path_argument, help="folder that `declutr index` made")
    parser.add_argument("query", nargs="+", help="one or more queries")
    parser.add_argument("--top", type=int, default=10, help="number of texts to show (10)")
    parser.add_argument("--weight", type=float, help="weight of the words of a hybrid index (the index's)")
    parser.add_argument("--model", help="the encoder, if it has moved since the embeddings were made")
    parser.shared("--trust-remote-code")
    options = parser.parse_args(arguments)
    if options.top < 1:
        parser.error(f"--top {options.top}: must be at least 1")
    if not all(query.strip() for query in options.query):
        parser.error("the query is empty; give at least one word")
    if options.query == ["-"]:
        parser.error("a query is not read from a pipe; write it behind the index")
    check_index(options.index, options.query)
    from declutr.embedding.index import Searcher

    searcher = Searcher(options.index, model=options.model, weight=options.weight,
                        trust_remote_code=options.trust_remote_code)  # fmt: skip
    answers = [(query, searcher.search(query, options.top)) for query in options.query]
    for query, hits in answers:
        if len(answers) > 1:
            print(f"# {query}")
        for hit in hits:
            text = " ".join(hit.text.split())
            parts = "" if hit.lexical is None else f" = {hit.cosine:.3f} + {searcher.weight:g} x {hit.lexical:.3f}"
            place = hit.id or f"{hit.source}{f' text {hit.number}' if hit.number and hit.number > 1 else ''}"
            place += f" {hit.source}" if hit.id and hit.number is None else ""  # of --source-field
            place = shorten(" ".join(place.split()), _SHOWN_CHARACTERS // 2)  # it may be any text, of several lines
            place += "" if hit.line is None else f" line {hit.line}"
            text = f"{' '.join(hit.heading.split())}: {text}" if hit.heading else text
            print(f"{hit.score:6.3f}{parts}  {place}  {shorten(text, _SHOWN_CHARACTERS)}")
    if len(answers) > 2 and not any(" " in query for query in options.query):
        sys.stderr.write(f"each of the {len(answers)} words was a query; put a question in quotes\n")
    return 0


def run_adapt(arguments: list[str]) -> int:
    """Adapt an encoder; return the exit status, which is 0 for every verdict."""
    parser = Parser(
        "adapt",
        "Fit an encoder to your documents without labels, and say whether it is better on documents that it has not "
        "seen (with --pairs, on such queries). Repeat the command to continue after a stop.",
    )
    parser.add_argument("encoder", metavar="ENCODER", help="folder or name of the encoder to start from")
    parser.add_argument("corpus", nargs="*", metavar="CORPUS", help="files, folders or globs of documents")
    parser.add_argument("--output", type=path_argument, required=True, help="folder of the result")
    parser.add_argument("--passages", help="own passages in place of CORPUS (JSONL or CSV with `text` and `document`)")
    parser.add_argument("--format", choices=FORMATS, help="format of the documents (auto)")
    parser.add_argument("--pairs", help="own queries and answers (JSONL or CSV with `query` and `text`): they decide")
    parser.add_argument("--passage-tokens", type=int, help="tokens of a passage, at most the encoder's window (62)")
    parser.add_argument("--minutes", type=float, help="sizes the training (30)")
    parser.add_argument("--steps", type=int, help="steps of the training (twenty passes, or as many as there is time"
                        " for); 0: the closed form alone")  # fmt: skip
    parser.add_argument("--stsb", metavar="FOLDER", help="folder with sts-test.csv: measures what was lost in general")
    parser.add_argument("--seed", type=int, help="seed of split, training and intervals (0)")
    parser.add_argument("--train-on-pairs", action="store_true", help="train on a third of --pairs, too")
    parser.add_argument("--skip-bad", action="store_true", help="leave out documents that cannot be read")
    parser.add_argument("--private", action="store_true", help="write no text of the documents to the report")
    parser.shared("--text-field", "--address", "--trust-remote-code")
    options = _options(parser, arguments, join_fields=False)
    setup_logging("adapt")
    check_there([_path(options["encoder"]), *options["corpus"], *map(options.get, ("passages", "pairs", "stsb"))])
    from declutr.adaptation.checks import check_places, corpus_problems
    from declutr.adaptation.config import REPORT, AdaptConfig
    from declutr.common.config import load_config

    values = {name: value for name, value in options.items() if name in AdaptConfig.model_fields}
    config = load_config(values, "adapt", AdaptConfig).located()
    problems = check_places(config, options["output"].absolute(), options.get("address"))[0]
    if problems := [*problems, *corpus_problems(config)]:
        raise UsageError("\n".join(problems))
    from declutr.adaptation.job import adapt  # loads torch and Ray, for which a wrong path need not wait

    result = adapt(**options)
    for row in result.rows:
        scores = ", ".join(f"{measure} {100 * score:.1f}" for measure, score in row.scores.items())
        print(f"{row.name:32s} {scores}")
    print(result.sentence)
    if result.general:
        print(result.general)
    if result.looks > 1:
        print(f"This is look {result.looks} at a test in this folder: its interval is too narrow")
    written = f"the encoder is {result.encoder}" if result.encoder else "no encoder was written"
    report = options["output"] / REPORT  # needs packages that may not be there
    print(f"{report if report.is_file() else options['output']}; {written}")
    if result.encoder and config.corpus:
        form = "" if config.format == "auto" else f" --format {config.format}"
        fields = [] if config.text_field == ["text"] else config.text_field
        form += "".join(f" --text-field {shlex.quote(name)}" for name in fields)
        form += " --skip-bad" if config.skip_bad or result.facts["failed"] else ""
        inputs = shlex.join([str(result.encoder), *options["corpus"]])
        print(f"next: declutr embed {inputs} --output texts.parquet --passages --headings{form}")
        weight = f"{result.facts['words_weight']:g}"
        print(f"      declutr index texts.parquet --output texts.index --hybrid --weight {weight}")
    return 0


def export(model: str | PathLike[str], output: str | PathLike[str], **settings: Any) -> dict[str, Any]:
    """Write a smaller or faster form of an encoder to a new folder, and measure it.

    Args:
        model: encoder, as `load` takes it.
        output: folder to create.
        settings: the others of `ExportConfig`: to (onnx, onnx-int8, static), corpus, text_field, stsb, pairs,
            max_tokens, vocabulary_size, dimensions, trust_remote_code.

    Returns:
        The measurement, as in `measurement.json`: bytes, speedup, cosine, scores before and after.

    Raises:
        ConfigError: with every problem of the settings.
        UsageError: every problem of the data.
        EncoderError: the encoder cannot be loaded or exported.
    """
    from declutr.common.config import load_config
    from declutr.evaluation.export.inputs import ExportConfig, read_inputs

    places = {name: expand(settings[name], name) for name in ("stsb", "pairs") if settings.get(name) is not None}
    values = {"model": str(model), "output": expand(output, "output"), **settings, **places}
    if settings.get("corpus") is not None:
        values["corpus"] = listed(settings["corpus"])
    config = load_config(values, "export", ExportConfig)
    inputs = read_inputs(config)
    from declutr.evaluation.export.job import export_encoder  # loads torch
    from declutr.reproduction import provenance

    return export_encoder(config, inputs, provenance.facts(["declutr", *sys.argv[1:]]))


def run_export(arguments: list[str]) -> int:
    """Export an encoder and measure the export; return the exit status."""
    parser = Parser("export", "Write a smaller or faster form of an encoder, and measure it.")
    parser.add_argument("model", help="as `declutr embed` takes it")
    parser.add_argument("--to", choices=TARGETS, required=True, help="a graph in float32; a graph in 8-bit integers; "
                        "a table of token vectors (--corpus)")  # fmt: skip
    parser.add_argument("--output", type=path_argument, required=True, help="folder to create")
    parser.add_argument("--corpus", nargs="+", help="files, folders or globs of texts: words of a table, ranges of "
                        "integers")  # fmt: skip
    parser.add_argument("--stsb", type=path_argument, help="folder with sts-test.csv: scores before and after")
    parser.add_argument("--pairs", type=path_argument, help="queries with their texts: scores before and after")
    parser.add_argument("--max-tokens", type=int, help="most tokens of an input of a graph (encoder's limit)")
    parser.add_argument("--vocabulary-size", type=int, help="most tokens of a table (30,000)")
    parser.add_argument("--dimensions", type=int, help="most numbers of an embedding of a table (256)")
    parser.shared("--text-field", "--trust-remote-code")
    options = _options(parser, arguments)
    check_there([_path(options["model"]), *options.get("corpus", []), options.get("stsb"), options.get("pairs")])
    with _in_options():
        figures = export(**options)
    parts = [f"{figures['bytes']:,} bytes", f"{figures['texts_per_second']['export']:,} texts a second"]
    parts.append(f"{figures['speedup']:.2f} times as fast as {figures['compared_with']} in float32")
    if figures["cosine"] is not None:
        same = figures.get("texts_of_ranges")
        ranges = f" ({same} of {figures['texts']} texts set its ranges)" if same else ""
        parts.append(f"cosine {figures['cosine']:.4f}{ranges}")
    if "stsb_after" in figures:
        parts.append(f"STS-B {figures['stsb_before']:.2f} before, {figures['stsb_after']:.2f} after")
    for name, scores in list(figures.get("pairs", {}).items())[:1]:
        parts.append(f"{name} {100 * scores['before']:.1f} before, {100 * scores['after']:.1f} after")
    print(f"{options['output']}: {', '.join(parts)}")
    corpus = figures.get("corpus", {"skipped": {}, "cut": False})
    for reason, number in corpus["skipped"].items():
        print(f"skipped: {number:,} {reason}")
    if corpus["cut"]:
        print(f"corpus: cut after {corpus['read']:,} texts, which hardly changes ranges and frequent words")
    return 0
