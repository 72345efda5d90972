"""`declutr evaluate`: encoders on SentEval's tasks; without an encoder, SentEval's data, fetched and checked."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.paths import path_argument

if TYPE_CHECKING:
    from evaluation.senteval.data.findings import Inspection
    from evaluation.senteval.runner.plan import Choice
    from evaluation.senteval.scores.results import Protocol

_PROTOCOLS: dict[str, tuple["Protocol", ...]] = {
    "senteval": ("senteval",),
    "simcse": ("simcse",),
    "both": ("senteval", "simcse"),
}


def run(arguments: list[str]) -> int:
    """Runs it; returns the exit status, 1 when a transfer failed, data are refused or unusable, or scores lack."""
    parser = _parser()
    given = parser.parse_intermixed_args(arguments)
    if given.mteb is not None:
        if not given.encoders or given.follow or given.pretrained:
            parser.error("--mteb takes one ENCODER or more, and neither --follow nor --pretrained")
        return _evaluate_mteb(given)
    from evaluation.senteval.checks.checking import inspect
    from evaluation.senteval.data.tasks import STS, TRANSFER, UnknownTaskError, find
    from evaluation.senteval.download.overview import overview
    from evaluation.senteval.runner.plan import choose_tasks

    failed = _download(given.download, given.mirror) if given.download else False
    default = [*STS, *TRANSFER] if given.protocol == "simcse" else ["all"]
    try:
        names = choose_tasks(given.tasks.split(",") if given.tasks else default)
    except UnknownTaskError as error:
        sys.stderr.write(f"--tasks: {error}\n")
        return 1
    data = given.data or given.download
    inspections = [inspect(find(name), data, given.allow_unchecked) for name in names]
    print("\n".join(overview(inspections)), flush=True)
    failed |= any(inspection.standing == "refused" for inspection in inspections)
    failed |= not any(inspection.usable for inspection in inspections)
    if given.follow:
        return _follow(given, inspections, _choice(given, names))
    if given.encoders or given.pretrained:
        failed |= not _evaluate(given, inspections, _choice(given, names))
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="declutr evaluate",
        description="Encoders on SentEval's tasks; without one, SentEval's data are fetched and checked.",
    )
    parser.add_argument("encoders", nargs="*", metavar="ENCODER", help="export, run, checkpoint, model name or folder, "
                        "word vectors, hashed-words:SIZE, untrained:NAME")  # fmt: skip
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--data", type=path_argument, help="folder in SentEval's layout (downstream/, probing/)")
    where.add_argument("--download", type=path_argument, help="fetch what is missing into this folder first")
    where.add_argument("--mteb", metavar="TASK[,TASK]", help="tasks of MTEB instead (pip install 'declutr-ray[mteb]')")
    parser.add_argument("--mirror", help="address that has the same files, instead of the public ones")
    parser.add_argument("--allow-unchecked", action="store_true", help="own data: mark what differs, do not refuse it")
    parser.add_argument("--tasks", help="names and sets (all, downstream, probing, sts, transfer), by commas")
    parser.add_argument("--protocol", choices=_PROTOCOLS, default="senteval", help="senteval: DeCLUTR's tables")
    parser.add_argument("--preset", choices=("official", "prototyping"), default="official", help="of the classifiers")
    parser.add_argument(
        "--output", type=path_argument, default=Path("scores"), help="folder of results and tables (scores)"
    )
    parser.add_argument("--pretrained", metavar="ENCODER", help="the tables' column Δ is the difference to it (what an "
                        "export says it started from); it is scored too")  # fmt: skip
    parser.add_argument("--follow", type=path_argument, metavar="RUN", help="score a run's checkpoints while it trains")
    parser.add_argument("--once", action="store_true", help="with --follow: score what is there and stop")
    parser.add_argument("--every-seconds", type=float, default=10.0, help="with --follow: between two looks (10)")
    parser.add_argument("--cpus", type=int, help="processes for classifiers (all; with --follow 1)")
    parser.add_argument("--address", help="of a Ray cluster on which classifiers are fitted")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that encoders bring along")
    parser.add_argument("--device", help="of the encoder: cpu, cuda (a GPU when there is one; with --follow cpu)")
    return parser


def _download(folder: Path, mirror: str | None) -> bool:
    """Fetches what can be had; whether something failed."""
    from evaluation.senteval.download.downloading import download
    from evaluation.senteval.download.overview import transfers
    from evaluation.senteval.download.sources import public_sources, relocated

    sources = relocated(public_sources(), mirror) if mirror else public_sources()
    fetched = download(folder, sources, _say)
    print("\n".join(transfers(fetched, sources)))
    return any(file.outcome == "failed" for file in fetched)


def _choice(given: argparse.Namespace, names: tuple[str, ...]) -> "Choice":
    from evaluation.senteval.classifier.settings import ClassifierConfig
    from evaluation.senteval.runner.plan import Choice

    classifier = ClassifierConfig.official() if given.preset == "official" else ClassifierConfig.prototyping()
    return Choice(tasks=names, protocols=_PROTOCOLS[given.protocol], classifier=classifier)


def _evaluate(given: argparse.Namespace, inspections: Sequence["Inspection"], choice: "Choice") -> bool:
    """Scores all encoders and writes the tables; whether every one could be scored."""
    from common.session import SessionConfig
    from evaluation.encoders.loading import EncoderError, load_encoder
    from evaluation.senteval.data.taskdata import sentence_rows
    from evaluation.senteval.runner.harness import evaluate
    from evaluation.tables.write import write_tables

    if not any(inspection.usable for inspection in inspections):
        sys.stderr.write("nothing is scored: there are no usable data of the chosen tasks\n")
        return False
    session = SessionConfig(num_cpus=given.cpus, address=given.address)
    evaluated, failed, vocabulary = [], [], None
    names = dict.fromkeys([*given.encoders, *([given.pretrained] if given.pretrained else [])])
    if any(Path(name).is_file() for name in names):  # of a file of word vectors, only what occurs is read
        texts = sentence_rows(inspection.data for inspection in inspections if inspection.data)
        vocabulary = {word for text in texts for word in text.split()}
    for name in names:
        try:
            trust = given.trust_remote_code
            encoder = load_encoder(
                name, device=given.device, vocabulary=vocabulary, tokenized=True, trust_remote_code=trust
            )
            if unused := getattr(encoder, "unused", ()):
                _say(f"{name}: parts of its files that no embedding is made of are left out: {', '.join(unused)}")
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
            sys.stderr.write(f"not scored: {name}: no task has a score; the table says why\n")
        shown = write_tables(evaluated, given.output)  # after each: what is there can be looked at
    if evaluated:
        print(
            f"\n{shown}\n{given.output / 'scores.html'} shows it beside published numbers; scores.md, scores.json too"
        )
    if failed and len(names) > 1:
        sys.stderr.write(f"{len(failed)} of {len(names)} encoders were not scored: {', '.join(failed)}\n")
    return not failed


def _evaluate_mteb(given: argparse.Namespace) -> int:
    """Scores all encoders on MTEB's tasks; 1 when one could not be scored."""
    from importlib.util import find_spec

    from common.hub import stay_offline_unless_it_answers
    from evaluation.encoders.loading import EncoderError, load_encoder

    if find_spec("mteb") is None:
        sys.stderr.write("--mteb needs MTEB: pip install 'declutr-ray[mteb]'\n")
        return 1
    stay_offline_unless_it_answers()  # before MTEB's own libraries look
    from evaluation.mteb import choose_mteb, score_mteb, write_mteb

    scores: dict[str, dict[str, float]] = {}
    try:
        tasks = choose_mteb(given.mteb.split(","))
    except EncoderError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for name in given.encoders:
        try:
            encoder = load_encoder(name, device=given.device, trust_remote_code=given.trust_remote_code)
            scores[name] = score_mteb(encoder, tasks, given.output, _say)
        except EncoderError as error:
            sys.stderr.write(f"not scored: {error}\n")
            continue
        write_mteb(scores, given.output)
    if scores:
        print(f"{given.output / 'mteb.json'} has the main scores, {given.output / 'mteb'} all of MTEB's figures")
    return int(len(scores) < len(given.encoders))


def _follow(given: argparse.Namespace, inspections: Sequence["Inspection"], choice: "Choice") -> int:
    import torch

    from common.session import SessionConfig
    from evaluation.watch import Follower, FollowError

    threads = torch.get_num_threads()
    torch.set_num_threads(given.cpus or 1)  # the workers have the rest
    session = SessionConfig(num_cpus=given.cpus or 1, address=given.address)
    try:
        trust = given.trust_remote_code
        follower = Follower(given.follow, inspections, choice, given.device or "cpu", session, _say, trust)
        number = follower.follow(given.every_seconds, given.once)
    except FollowError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        torch.set_num_threads(threads)
    print(f"{given.follow}: {number} checkpoints scored")
    return int(not number and bool(follower.pending()))


def _say(line: str) -> None:
    print(line, flush=True)
