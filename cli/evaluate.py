"""`declutr evaluate`: scores encoders on SentEval's tasks; without an encoder, fetches and checks SentEval's data."""

import argparse
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from declutr.common.console.terminal import refused
from declutr.common.paths import path_argument
from declutr.evaluation.encoders.protocol import Pooling

if TYPE_CHECKING:
    from declutr.evaluation.encoders.protocol import SentenceEncoder
    from declutr.evaluation.senteval.data.taskdata import Inspection
    from declutr.evaluation.senteval.runner.plan import ScoringChoice
    from declutr.evaluation.senteval.scores.results import Protocol

_PROTOCOLS: dict[str, tuple["Protocol", ...]] = {
    "senteval": ("senteval",),
    "simcse": ("simcse",),
    "both": ("senteval", "simcse"),
}


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status: 1 if a transfer failed, data are unusable, or scores are missing."""
    parser = _parser()
    given = parser.parse_intermixed_args(arguments)
    if given.mteb is not None:
        if not given.encoders or given.follow or given.pretrained:
            parser.error("--mteb takes one ENCODER or more, and neither --follow nor --pretrained")
        return _evaluate_mteb(given)
    if given.pairs is not None:
        if not given.encoders or given.follow or given.pretrained:
            parser.error("--pairs takes one ENCODER or more, and neither --follow nor --pretrained")
        return _evaluate_pairs(given)
    if given.follow and given.pooling:
        parser.error("--follow scores a run with its own pooling; remove --pooling")
    if given.data is not None and not given.data.is_dir():
        return refused(
            f"--data {given.data}: no such folder; `declutr evaluate --download {given.data}` fetches SentEval's data"
        )
    from declutr.evaluation.senteval.checks.checking import inspect
    from declutr.evaluation.senteval.classifier.config import ClassifierConfig
    from declutr.evaluation.senteval.data.tasks import STS, TRANSFER, UnknownTaskError, find
    from declutr.evaluation.senteval.download.downloading import overview
    from declutr.evaluation.senteval.runner.plan import SETS, ScoringChoice, choose_tasks

    default = [*STS, *TRANSFER] if given.protocol == "simcse" else ["all"]
    try:
        names = choose_tasks(given.tasks.split(",") if given.tasks else default)
    except UnknownTaskError as error:
        return refused(f"--tasks: {error}")
    data = given.data or given.download
    wanted = names if given.tasks else SETS["all"]
    failed = _download(data, given.mirror, wanted) if given.download else False
    inspections = [inspect(find(name), data, given.allow_unchecked) for name in names]
    print("\n".join(overview(inspections)), flush=True)
    failed |= any(inspection.standing == "refused" for inspection in inspections)
    failed |= not any(inspection.usable for inspection in inspections)
    classifier = ClassifierConfig.official() if given.preset == "official" else ClassifierConfig.prototyping()
    choice = ScoringChoice(tasks=names, protocols=_PROTOCOLS[given.protocol], classifier=classifier)
    if given.follow:
        return _follow(given, inspections, choice)
    if given.encoders or given.pretrained:
        failed |= not _evaluate(given, inspections, choice)
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="declutr evaluate",
        description="Score encoders on SentEval's tasks. Without an encoder: fetch and check SentEval's data.",
    )
    parser.add_argument("encoders", nargs="*", metavar="ENCODER", help="export, run, checkpoint, model name or folder, "
                        "word vectors, hashed-words:SIZE, untrained:NAME")  # fmt: skip
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
        "--tasks", help="names and sets (all, downstream, probing, sts, transfer, stsb-multi), separated by commas"
    )
    parser.add_argument("--protocol", choices=_PROTOCOLS, default="senteval", help="senteval: DeCLUTR's tables")
    parser.add_argument("--preset", choices=("official", "prototyping"), default="official", help="classifier settings")
    parser.add_argument(
        "--output", type=path_argument, default=Path("scores"), help="folder of results and tables (scores)"
    )
    parser.add_argument("--pretrained", metavar="ENCODER", help="score this encoder too; column Δ is the difference to "
                        "it (default: the encoder that an export was trained from)")  # fmt: skip
    parser.add_argument("--follow", type=path_argument, metavar="RUN", help="score a run's checkpoints while it trains")
    parser.add_argument("--once", action="store_true", help="with --follow: score existing checkpoints and stop")
    parser.add_argument("--every-seconds", type=float, default=10.0, help="with --follow: pause between looks (10)")
    parser.add_argument("--cpus", type=int, help="processes for classifiers (all; with --follow 1)")
    parser.add_argument("--address", help="address of a Ray cluster that fits classifiers")
    parser.add_argument("--pooling", choices=get_args(Pooling), help="pooling of the encoders, instead of their own")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with encoders")
    parser.add_argument("--device", help="device of the encoder: cpu, cuda (a GPU if present; with --follow cpu)")
    parser.add_argument(
        "--precision", choices=("auto", "fp32", "bf16"), default="auto", help="bf16 on GPUs by default; fp32 is exact"
    )
    return parser


def _download(folder: Path, mirror: str | None, tasks: Sequence[str]) -> bool:
    """Fetch all available files of the tasks; return whether a transfer failed."""
    from declutr.evaluation.senteval.download.downloading import download, transfers
    from declutr.evaluation.senteval.download.sources import public_sources, relocated, restricted

    sources = restricted(public_sources(), tasks)
    sources = relocated(sources, mirror) if mirror else sources
    fetched = download(folder, sources, _say)
    print("\n".join(transfers(fetched, sources)))
    return any(file.outcome == "failed" for file in fetched)


def _evaluate(given: argparse.Namespace, inspections: Sequence["Inspection"], choice: "ScoringChoice") -> bool:
    """Score all encoders and write the tables; return whether every encoder was scored."""
    from declutr.common.cluster import SessionConfig
    from declutr.evaluation.encoders.loading import EncoderError
    from declutr.evaluation.senteval.data.taskdata import sentence_rows
    from declutr.evaluation.senteval.runner.harness import evaluate
    from declutr.evaluation.tables.write import write_tables

    if not any(inspection.usable for inspection in inspections):
        sys.stderr.write("nothing was scored: the chosen tasks have no usable data\n")
        return False
    session = SessionConfig(num_cpus=given.cpus, address=given.address)
    evaluated, failed, vocabulary = [], [], None
    names = dict.fromkeys([*given.encoders, *([given.pretrained] if given.pretrained else [])])
    if any(Path(name).is_file() for name in names):  # read only the needed words of a file of word vectors
        texts = sentence_rows(inspection.data for inspection in inspections if inspection.data)
        vocabulary = {word for text in texts for word in text.split()}
    for name in names:
        try:
            encoder = _load(name, given, vocabulary, tokenized=True)
            if unused := getattr(encoder, "unused", ()):
                _say(f"{name}: its files also contain parts that embeddings do not use: {', '.join(unused)}")
            found = evaluate(encoder, inspections, choice, given.output, session, _say)
        except EncoderError as error:
            failed.append(name)
            sys.stderr.write(f"not scored: {error}\n")
            continue
        if given.pretrained:
            found = replace(found, pretrained=given.pretrained)
        evaluated.append(found)
        if not any(report.results for report in found.reports.values()):
            failed.append(name)
            sys.stderr.write(f"not scored: {name}: no task has a score; the table gives the reasons\n")
        shown = write_tables(evaluated, given.output)  # after each encoder, so that a long call can be watched
    if evaluated:
        print(
            f"\n{shown}\n{given.output / 'scores.html'} compares with published numbers; also: scores.md, scores.json"
        )
    if failed and len(names) > 1:
        sys.stderr.write(f"{len(failed)} of {len(names)} encoders were not scored: {', '.join(failed)}\n")
    return not failed


def _load(
    name: str, given: argparse.Namespace, vocabulary: Collection[str] | None = None, tokenized: bool = False
) -> "SentenceEncoder":
    """Load an encoder as the options say.

    Raises:
        EncoderError: it cannot be loaded, or an option has no effect on it.
    """
    from declutr.evaluation.encoders.loading import EncoderError, load_encoder

    encoder = load_encoder(
        name,
        given.pooling,
        device=given.device,
        vocabulary=vocabulary,
        tokenized=tokenized,
        trust_remote_code=given.trust_remote_code,
        precision=given.precision,
    )
    if given.pooling and not hasattr(encoder, "encoder"):
        raise EncoderError(f"{name}: --pooling {given.pooling} has no effect on word vectors; remove it")
    return encoder


def _evaluate_pairs(given: argparse.Namespace) -> int:
    """Score baselines and encoders on the user's pairs; return 1 if one could not be scored."""
    from declutr.evaluation.retrieval.pairs import PairsError, read_test

    try:
        test = read_test(given.pairs, given.documents)
    except (PairsError, OSError) as error:
        return refused(error)
    from declutr.evaluation.encoders.loading import EncoderError
    from declutr.evaluation.retrieval.compare import score_encoder, score_lexical, write_comparison
    from declutr.evaluation.retrieval.lexicon import Lexicon

    lexicon = Lexicon(test.texts)
    scored, names = score_lexical(test, lexicon), list(dict.fromkeys(given.encoders))
    for name in names:
        try:
            encoder = _load(name, given)
        except EncoderError as error:
            return refused(f"not scored: {error}")
        scored += score_encoder(test, encoder, lexicon)
    print(write_comparison(test, scored, names, given.output))
    print(f"\n{given.output / 'pairs.json'} has all numbers")
    return 0


def _evaluate_mteb(given: argparse.Namespace) -> int:
    """Score all encoders on MTEB's tasks; return 1 if one could not be scored."""
    from importlib.util import find_spec

    from declutr.common.hub import stay_offline_unless_it_answers
    from declutr.evaluation.encoders.loading import EncoderError

    if find_spec("mteb") is None:
        sys.stderr.write("--mteb needs MTEB: pip install -e '.[mteb]' in the checkout\n")
        return 1
    stay_offline_unless_it_answers()  # before MTEB's libraries contact the hub
    from declutr.evaluation.mteb import choose_mteb, score_mteb, write_mteb

    scores: dict[str, dict[str, float]] = {}
    try:
        tasks = choose_mteb(given.mteb.split(","))
    except EncoderError as error:
        return refused(error)
    for name in given.encoders:
        try:
            encoder = _load(name, given)
            scores[name] = score_mteb(encoder, tasks, given.output, _say)
        except EncoderError as error:
            sys.stderr.write(f"not scored: {error}\n")
            continue
        write_mteb(scores, given.output)
    if scores:
        print(f"main scores: {given.output / 'mteb.json'}; all of MTEB's figures: {given.output / 'mteb'}")
    return int(len(scores) < len(given.encoders))


def _follow(given: argparse.Namespace, inspections: Sequence["Inspection"], choice: "ScoringChoice") -> int:
    import torch

    from declutr.common.cluster import SessionConfig
    from declutr.evaluation.watch import Follower, FollowError

    threads = torch.get_num_threads()
    torch.set_num_threads(given.cpus or 1)  # leave the other CPUs to the workers
    session = SessionConfig(num_cpus=given.cpus or 1, address=given.address)
    try:
        trust = given.trust_remote_code
        follower = Follower(given.follow, inspections, choice, given.device or "cpu", session, _say, trust)
        number = follower.follow(given.every_seconds, given.once)
    except FollowError as error:
        return refused(error)
    finally:
        torch.set_num_threads(threads)
    print(f"{given.follow}: {number} checkpoints scored")
    return int(not number and bool(follower.pending()))


def _say(line: str) -> None:
    print(line, flush=True)
