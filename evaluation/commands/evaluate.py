"""`declutr evaluate`: encoders on SentEval's tasks; without an encoder, SentEval's data, fetched and checked."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evaluation.senteval.findings import Inspection
    from evaluation.senteval.plan import Choice
    from evaluation.senteval.results import Protocol

_PROTOCOLS: dict[str, tuple["Protocol", ...]] = {
    "senteval": ("senteval",),
    "simcse": ("simcse",),
    "both": ("senteval", "simcse"),
}


def run(arguments: list[str]) -> int:
    """Runs it; returns the exit status, 1 when a transfer failed, data are refused or an encoder has no scores."""
    given = _parser().parse_intermixed_args(arguments)
    from evaluation.senteval.checking import inspect
    from evaluation.senteval.overview import overview
    from evaluation.senteval.plan import choose_tasks
    from evaluation.senteval.tasks import STS, TRANSFER, UnknownTaskError, find

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
    if given.follow:
        return _follow(given, inspections, _choice(given, names))
    if given.encoders:
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
    where.add_argument("--data", type=Path, help="folder in SentEval's layout (downstream/, probing/)")
    where.add_argument("--download", type=Path, help="fetch what is missing into this folder first")
    parser.add_argument("--mirror", help="address that has the same files, instead of the public ones")
    parser.add_argument("--allow-unchecked", action="store_true", help="own data: mark what differs, do not refuse it")
    parser.add_argument("--tasks", help="names and sets (all, downstream, probing, sts, transfer), by commas")
    parser.add_argument("--protocol", choices=_PROTOCOLS, default="senteval", help="senteval: DeCLUTR's tables")
    parser.add_argument("--preset", choices=("official", "prototyping"), default="official", help="of the classifiers")
    parser.add_argument("--output", type=Path, default=Path("scores"), help="folder of results and tables (scores)")
    parser.add_argument("--follow", type=Path, metavar="RUN", help="score a run's checkpoints while it trains")
    parser.add_argument("--once", action="store_true", help="with --follow: score what is there and stop")
    parser.add_argument("--every-seconds", type=float, default=10.0, help="with --follow: between two looks (10)")
    parser.add_argument("--cpus", type=int, help="processes for classifiers (all; with --follow 1)")
    parser.add_argument("--address", help="of a Ray cluster on which classifiers are fitted")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that encoders bring along")
    parser.add_argument("--device", help="of the encoder: cpu, cuda (a GPU when there is one; with --follow cpu)")
    return parser


def _download(folder: Path, mirror: str | None) -> bool:
    """Fetches what can be had; whether something failed."""
    from evaluation.senteval.downloading import download
    from evaluation.senteval.overview import transfers
    from evaluation.senteval.sources import public_sources, relocated

    sources = relocated(public_sources(), mirror) if mirror else public_sources()
    fetched = download(folder, sources, _say)
    print("\n".join(transfers(fetched, sources)))
    return any(file.outcome == "failed" for file in fetched)


def _choice(given: argparse.Namespace, names: tuple[str, ...]) -> "Choice":
    from evaluation.senteval.plan import Choice
    from evaluation.senteval.settings import ClassifierConfig

    classifier = ClassifierConfig.official() if given.preset == "official" else ClassifierConfig.prototyping()
    return Choice(tasks=names, protocols=_PROTOCOLS[given.protocol], classifier=classifier)


def _evaluate(given: argparse.Namespace, inspections: Sequence["Inspection"], choice: "Choice") -> bool:
    """Scores all encoders and writes the tables; whether every one could be scored."""
    from evaluation.encoder import EncoderError, load_encoder
    from evaluation.senteval.data import sentence_rows
    from evaluation.senteval.harness import evaluate
    from evaluation.tables.write import write_tables
    from pipeline.session import SessionConfig

    session = SessionConfig(num_cpus=given.cpus, address=given.address)
    evaluated, failures, vocabulary = [], [], None
    for name in given.encoders:
        if Path(name).is_file() and vocabulary is None:  # of a file of word vectors, only what occurs is read
            from evaluation.encoders.words import words_of

            texts = sentence_rows(inspection.data for inspection in inspections if inspection.data)
            vocabulary = {word for text in texts for word in words_of(text)}
        try:
            trust = given.trust_remote_code
            encoder = load_encoder(name, device=given.device, vocabulary=vocabulary, trust_remote_code=trust)
            evaluated.append(evaluate(encoder, inspections, choice, given.output, session, _say))
        except EncoderError as error:
            failures.append(str(error))
            sys.stderr.write(f"{error}\n")
            continue
        shown = write_tables(evaluated, given.output)  # after each: what is there can be looked at
    if evaluated:
        print(
            f"\n{shown}\n{given.output / 'scores.html'} shows it beside published numbers; scores.md, scores.json too"
        )
    if failures:
        sys.stderr.write("".join(f"not scored: {failure}\n" for failure in failures))
    return not failures


def _follow(given: argparse.Namespace, inspections: Sequence["Inspection"], choice: "Choice") -> int:
    import torch

    from evaluation.watch import Follower, FollowError
    from pipeline.session import SessionConfig

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
    return 0


def _say(line: str) -> None:
    print(line, flush=True)
