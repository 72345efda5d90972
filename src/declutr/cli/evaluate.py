"""`declutr evaluate`: scores encoders on SentEval's tasks; without an encoder, fetches and checks SentEval's data."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from declutr.cli.scoring import evaluate_mteb, evaluate_nanobeir, evaluate_pairs, load, say, with_checkpoints
from declutr.common.console.terminal import refused
from declutr.common.errors import EncoderError
from declutr.common.paths import path_argument
from declutr.encoders.protocol import Pooling, parse_sizes

if TYPE_CHECKING:
    from declutr.evaluation.senteval.harness import ScoringChoice
    from declutr.evaluation.senteval.scores import Protocol
    from declutr.evaluation.senteval.tasks import Inspection

_PROTOCOLS: dict[str, tuple["Protocol", ...]] = {
    "senteval": ("senteval",),
    "simcse": ("simcse",),
    "both": ("senteval", "simcse"),
}


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status: 1 if a transfer failed, data are unusable, or scores are missing."""
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    options.encoders = with_checkpoints(options.encoders)
    options.sizes = None if options.sizes is None else parse_sizes(options.sizes)
    if options.mteb is not None:
        if not options.encoders or options.pretrained:
            parser.error("--mteb takes one ENCODER or more, and no --pretrained")
        return evaluate_mteb(options)
    if options.pairs is not None:
        if not options.encoders or options.pretrained:
            parser.error("--pairs takes one ENCODER or more, and no --pretrained")
        return evaluate_pairs(options)
    if options.data is not None and not options.data.is_dir():
        return refused(
            f"--data {options.data}: no such folder; `declutr evaluate --download {options.data}` fetches SentEval's "
            "data"
        )
    from declutr.common.errors import UsageError
    from declutr.evaluation.retrieval import nanobeir
    from declutr.evaluation.senteval.data import inspect, overview
    from declutr.evaluation.senteval.harness import ScoringChoice
    from declutr.evaluation.senteval.network import ClassifierConfig
    from declutr.evaluation.senteval.tasks import SETS, STS, TRANSFER, choose_tasks, find

    default = [*STS, *TRANSFER] if options.protocol == "simcse" else ["all"]
    if options.cpus is not None and options.cpus < 1:
        return refused(f"--cpus {options.cpus}: must be 1 or more")
    data = options.data or options.download
    try:
        nano, words = nanobeir.split_names(options.tasks.split(",") if options.tasks else default)
        names = choose_tasks(words)
        tests = nanobeir.read_nanobeir(data, nano)
    except UsageError as error:
        return refused(f"--tasks: {error}")
    for line in nanobeir.overview(tests):
        say(line)
    fetch_names = names if options.tasks else SETS["all"]
    failed = _download(data, options.mirror, fetch_names) if options.download and names else False
    inspections = [inspect(find(name), data, options.allow_unchecked) for name in names]
    if names:
        print("\n".join(overview(inspections)), flush=True)
        failed |= any(inspection.standing == "refused" for inspection in inspections)
        failed |= not any(inspection.usable for inspection in inspections)
    classifier = ClassifierConfig.official() if options.preset == "official" else ClassifierConfig.prototyping()
    choice = ScoringChoice(tasks=names, protocols=_PROTOCOLS[options.protocol], classifier=classifier)
    if options.encoders or options.pretrained:
        failed |= bool(tests) and not evaluate_nanobeir(options, tests)
        failed |= bool(names) and not _evaluate(options, inspections, choice)
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="declutr evaluate",
        description="Score encoders on SentEval's tasks. Without an encoder: fetch and check SentEval's data.",
    )
    parser.add_argument("encoders", nargs="*", metavar="ENCODER", help="export, checkpoint, run (its checkpoints), "
                        "model name or folder, word vectors, hashed-words:SIZE, untrained:NAME")  # fmt: skip
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--data", type=path_argument, help="folder in SentEval's layout (downstream/, probing/)")
    where.add_argument("--download", type=path_argument, help="fetch missing files of the tasks into this folder"
                       " first")  # fmt: skip
    where.add_argument("--mteb", metavar="TASK[,TASK]", help="score MTEB tasks (needs pip install -e '.[mteb]')")
    where.add_argument("--pairs", type=path_argument, metavar="FILE", help="score retrieval with your own pairs: JSONL "
                       "or CSV with `query` and `text`, or with `query` and `id` and --documents")  # fmt: skip
    parser.add_argument("--documents", type=path_argument, metavar="FILE", help="with --pairs: JSONL or CSV with the "
                        "`id` and the `text` of every document to search")  # fmt: skip
    parser.add_argument("--mirror", help="address of a copy of the files, instead of the public sources")
    parser.add_argument("--allow-unchecked", action="store_true", help="accept own data; differences are marked")
    parser.add_argument(
        "--tasks",
        help="names and sets (all, downstream, probing, sts, transfer, stsb-multi, nanobeir), separated by commas",
    )
    parser.add_argument("--sizes", metavar="SIZE[,SIZE]", help="also score the first SIZE numbers of embeddings; none: "
                        "not those that an encoder declares")  # fmt: skip
    parser.add_argument("--protocol", choices=_PROTOCOLS, default="senteval", help="senteval: DeCLUTR's tables")
    parser.add_argument("--preset", choices=("official", "prototyping"), default="official", help="classifier settings")
    parser.add_argument(
        "--output", type=path_argument, default=Path("scores"), help="folder of results and tables (scores)"
    )
    parser.add_argument("--pretrained", metavar="ENCODER", help="score this encoder too; column Δ is the difference to "
                        "it (default: the encoder that an export was trained from)")  # fmt: skip
    parser.add_argument("--cpus", type=int, help="processes for classifiers (all)")
    parser.add_argument("--address", help="address of a Ray cluster that fits classifiers")
    parser.add_argument("--pooling", choices=get_args(Pooling), help="pooling of the encoders, instead of their own")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with encoders")
    parser.add_argument("--device", help="device of the encoder: cpu, cuda (a GPU if present)")
    parser.add_argument(
        "--precision", choices=("auto", "fp32", "bf16"), default="auto", help="bf16 on GPUs by default; fp32 is exact"
    )
    return parser


def _download(folder: Path, mirror: str | None, tasks: Sequence[str]) -> bool:
    """Fetch all available files of the tasks; return whether a transfer failed."""
    from declutr.evaluation.senteval.data import download, transfers

    fetched = download(folder, tasks, mirror, say)
    print("\n".join(transfers(fetched, tasks)))
    return any(file.outcome == "failed" for file in fetched)


def _evaluate(options: argparse.Namespace, inspections: Sequence["Inspection"], choice: "ScoringChoice") -> bool:
    """Score all encoders and write the tables; return whether every encoder was scored."""
    from declutr.common.cluster import SessionConfig
    from declutr.common.extras import missing_extra
    from declutr.common.lock import RunLock
    from declutr.encoders.protocol import sizes_of, with_cuts
    from declutr.evaluation.senteval.harness import evaluate
    from declutr.evaluation.senteval.tasks import sentence_rows
    from declutr.evaluation.tables import write_tables
    from declutr.report.page import write_scores_page

    if not any(inspection.usable for inspection in inspections):
        sys.stderr.write("nothing was scored: the chosen tasks have no usable data\n")
        return False
    session = SessionConfig(num_cpus=options.cpus, address=options.address)
    evaluated, failed, vocabulary = [], [], None
    names = dict.fromkeys([*options.encoders, *([options.pretrained] if options.pretrained else [])])
    if any(Path(name).is_file() for name in names):  # read only the needed words of a file of word vectors
        texts = sentence_rows(inspection.data for inspection in inspections if inspection.data)
        vocabulary = {word for text in texts for word in text.split()}
    options.output.mkdir(parents=True, exist_ok=True)
    page = options.output / "scores.html"
    lack = missing_extra("report", f"{page} is not written")
    # another call would remove embeddings that this one reads, and replace its tables
    with RunLock(options.output, lambda: say(f"{options.output}: another command has taken over")):
        for name in names:
            try:
                encoder = load(name, options, vocabulary, tokenized=True)
                if unused := getattr(encoder, "unused", ()):
                    say(f"{name}: its files also contain parts that embeddings do not use: {', '.join(unused)}")
                of_sizes = [
                    evaluate(variant, inspections, choice, options.output, session, say)
                    for variant in with_cuts(encoder, sizes_of(encoder, options.sizes))
                ]
            except EncoderError as error:
                failed.append(name)
                sys.stderr.write(f"not scored: {error}\n")
                continue
            if options.pretrained:
                of_sizes = [replace(scored, pretrained=options.pretrained) for scored in of_sizes]
            evaluated += of_sizes
            if not any(report.results for scored in of_sizes for report in scored.reports.values()):
                failed.append(name)
                sys.stderr.write(f"not scored: {name}: no task has a score; the table gives the reasons\n")
            table = write_tables(evaluated, options.output)  # after each encoder, so that a long call can be watched
            if lack is None:
                write_scores_page(evaluated, page)
    if evaluated:
        compared = f"{page} compares with published numbers; also: scores.md, scores.json"
        if lack is not None:
            page.unlink(missing_ok=True)  # it would show earlier scores
            compared = f"{page.with_suffix('.md')} compares with published numbers; also: scores.json. {lack}"
        print(f"\n{table}\n{compared}")
    if failed and len(names) > 1:
        sys.stderr.write(f"{len(failed)} of {len(names)} encoders were not scored: {', '.join(failed)}\n")
    return not failed
