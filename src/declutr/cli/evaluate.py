"""`declutr evaluate`: scores encoders on SentEval, NanoBEIR, MTEB or pairs; fetches and checks SentEval's data."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from declutr.cli import Parser
from declutr.common.errors import ConfigError, DataError, EncoderError, UsageError, missing_extra, suggest
from declutr.common.lock import LOCK
from declutr.common.paths import check_there, expand, folder_problem, listed, path_argument

if TYPE_CHECKING:
    from declutr.encoders.protocol import SentenceEncoder
    from declutr.evaluation.retrieval.nanobeir import NanoTest
    from declutr.evaluation.senteval.harness import Evaluated, ScoringChoice
    from declutr.evaluation.senteval.scores import Protocol
    from declutr.evaluation.senteval.tasks import Inspection

_PROTOCOLS: dict[str, tuple["Protocol", ...]] = {
    "senteval": ("senteval",),
    "simcse": ("simcse",),
    "both": ("senteval", "simcse"),
}


_SOURCES = ("data", "download", "pairs", "mteb")
_SENTEVAL = ("data", "download")
_SOURCES_OF: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("tasks", "protocol", "preset", "cpus", "address", "allow_unchecked"), _SENTEVAL
)
_SOURCES_OF |= {"mirror": ("download",), "documents": ("pairs",)}
"""Sources for which an option has an effect; all for the others."""
_say = partial(print, flush=True)  # a progress line, at once


def run_evaluate(arguments: list[str]) -> int:
    """Run the command; return the exit status: 1 if a transfer failed, data are unusable, or scores are missing."""
    options = _parser().parse_intermixed_args(arguments)
    check_there([options.pairs, options.documents])
    return _evaluate(options)


def evaluate(encoders: str | PathLike[str] | Sequence[str | PathLike[str]] = (), **settings: Any) -> dict[str, Any]:
    """Score encoders as the command does, which prints its progress and tables and writes files.

    Args:
        encoders: as the command takes them; none: check the data.
        settings: the options of the command, with `_` for `-`; one of `data`, `download`, `pairs` and `mteb` is needed.

    Returns:
        The content of the files of scores, by their names without .json: `pairs`, `scores`, `nanobeir`, `mteb`.

    Raises:
        ConfigError: with every problem of the settings.
        UsageError: an option cannot be used, or something was not scored, which standard error names.
        DataError: the data cannot be used.
        EncoderError: an encoder cannot be loaded.
    """
    # argparse has no public list of options
    actions = {action.dest: action for action in _parser()._actions if action.dest not in ("help", "encoders")}
    problems = [f"{name}: unknown key{suggest(name, list(actions))}" for name in settings if name not in actions]
    if sum(settings.get(name) is not None for name in _SOURCES) != 1:
        problems.append(f"give one of {', '.join(_SOURCES)}")
    for name, value in settings.items():
        choices = actions[name].choices if name in actions else None
        if choices and value is not None and value not in choices:
            problems.append(f"{name} = {value!r}: must be one of {', '.join(choices)}")
    if problems:
        raise ConfigError("evaluate", problems)
    values = {name: action.default for name, action in actions.items()}
    for name, value in settings.items():
        if value is None:
            continue
        kind = bool if actions[name].nargs == 0 else actions[name].type
        if isinstance(value, list | tuple):  # of tasks or sizes
            value = ",".join(map(str, value))
        if kind in (bool, int) and type(value) is not kind:
            raise ConfigError("evaluate", [f"{name} = {value!r}: must be of type {kind.__name__}"])
        try:
            values[name] = expand(str(value)) if kind is path_argument else value if kind else str(value)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error
    options = argparse.Namespace(encoders=listed(encoders), **values)
    before = _file_states(options.output)
    if _evaluate(options):
        raise UsageError("evaluate: not everything was scored; standard error says why")
    # the others are of earlier calls
    fresh = [path for path, state in _file_states(options.output).items() if before.get(path) != state]
    return {path.stem: json.loads(path.read_text()) for path in fresh}


# What a killed call leaves.
_OWN = re.compile(rf"{re.escape(LOCK)}|embeddings|mteb|scores\.(md|html)|.*-[0-9a-f]{{8}}|\..+\.tmp")


def _file_states(output: Path) -> dict[Path, tuple[int, int]]:
    """Inode and time of each file of scores; compared with earlier ones, because a server has a clock of its own."""
    paths = [output / f"{name}.json" for name in ("pairs", "scores", "nanobeir", "mteb")]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths if path.is_file()}


def _evaluate(options: argparse.Namespace) -> int:
    """Do what the options say; return the exit status."""
    if (data := options.data) is not None and not data.is_dir():
        if data.exists():
            raise UsageError(f"--data {data}: is a file; name the folder that holds downstream/")
        raise UsageError(f"--data {data}: no such folder; `declutr evaluate --download {data}` fetches SentEval's data")
    from declutr.common.paths import expand_known
    from declutr.encoders.protocol import parse_sizes
    from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, checkpoint_path, steps_in

    names, options.encoders = options.encoders, list[str]()
    for name in names:  # a run stands for its checkpoints, oldest first; a run without one for itself
        folder = expand_known(name) / CHECKPOINTS
        steps = steps_in(folder) if folder.is_dir() else []
        options.encoders += [str(checkpoint_path(folder, step)) for step in steps] or [name]
    options.sizes = None if options.sizes is None else parse_sizes(options.sizes)
    for option, score in (("mteb", _score_mteb), ("pairs", _score_pairs)):
        if getattr(options, option) is not None:
            if not options.encoders or options.pretrained:
                raise UsageError(f"--{option} takes one ENCODER or more, and no --pretrained")
            _check_options(options)
            return score(options)
    _check_options(options)
    return _check_and_score(options)


def _check_options(options: argparse.Namespace) -> None:
    """Refuses what can be seen before libraries load: options without effect, and places that cannot be used."""
    from declutr.encoders.protocol import unloadable

    source = next(name for name in _SOURCES if getattr(options, name) is not None)
    problems = [
        f"--{name.replace('_', '-')}: has no effect with --{source}; omit it"
        for name, sources in _SOURCES_OF.items()
        if source not in sources and getattr(options, name) not in (None, False, "senteval", "official")
    ]
    if options.cpus is not None and options.cpus < 1:
        problems.append(f"--cpus {options.cpus}: must be 1 or more")
    names = [*options.encoders, *([options.pretrained] if options.pretrained else [])]
    if names and (problem := folder_problem(options.output)):
        problems.append(f"--output {options.output}: {problem}")
    elif names and options.output.is_dir() and not _file_states(options.output):
        foreign = sorted(path.name for path in options.output.iterdir() if not _OWN.fullmatch(path.name))
        problems += [f"--output {options.output}: holds {name}, not scores; name a new folder" for name in foreign[:1]]
    if options.download is not None and options.download.is_file():
        problems.append(f"--download {options.download}: is a file; name a folder")
    problems += [problem for name in names if (problem := unloadable(name))]
    if problems:
        raise UsageError("\n".join(problems))


def _parser() -> Parser:
    parser = Parser("evaluate", "Score encoders on SentEval, NanoBEIR, MTEB or pairs. Without one: check data.")
    parser.add_argument("encoders", nargs="*", metavar="ENCODER", help="export, checkpoint, run (its checkpoints), "
                        "model name or folder, hashed-words:SIZE, words:NAME, untrained:NAME")  # fmt: skip
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--data", type=path_argument, help="folder in SentEval's layout (downstream/, probing/)")
    where.add_argument("--download", type=path_argument, help="fetch missing files of the tasks into this folder"
                       " first")  # fmt: skip
    where.add_argument("--mteb", metavar="TASK[,TASK]", help="score MTEB tasks (needs pip install mteb)")
    where.add_argument("--pairs", type=path_argument, metavar="FILE", help="score retrieval with your own pairs: JSONL "
                       "or CSV with `query` and `text`, or with `query` and `id` and --documents")  # fmt: skip
    parser.add_argument("--documents", type=path_argument, metavar="FILE", help="with --pairs: JSONL or CSV with the "
                        "`id` and the `text` of every document to search")  # fmt: skip
    parser.add_argument("--mirror", help="address of a copy of the files, instead of the public sources")
    parser.add_argument("--tasks", help="names and sets (all, downstream, probing, sts, transfer, stsb-multi, nanobeir)"
                        ", separated by commas")  # fmt: skip
    parser.add_argument("--sizes", metavar="SIZE[,SIZE]", help="also score the first SIZE numbers of embeddings; "
                        "`none`: not those that an encoder declares")  # fmt: skip
    parser.add_argument("--protocol", choices=_PROTOCOLS, default="senteval", help="senteval: DeCLUTR's tables")
    parser.add_argument("--preset", choices=("official", "prototyping"), default="official", help="classifier settings")
    parser.add_argument("--output", type=path_argument, default=Path("scores"), help="folder of results and tables"
                        " (scores)")  # fmt: skip
    parser.add_argument("--pretrained", metavar="ENCODER", help="score this encoder too; column Δ is the difference to "
                        "it (default: the encoder that an export was trained from)")  # fmt: skip
    parser.add_argument("--cpus", type=int, help="processes for classifiers (all)")
    parser.add_argument("--device", help="device of the encoder: cpu, cuda (a GPU if present)")
    parser.shared("--query-prompt", "--document-prompt")
    parser.shared("--address", "--allow-unchecked", "--pooling", "--precision", "--trust-remote-code")
    return parser


def _load(name: str, options: argparse.Namespace) -> "SentenceEncoder":
    """Load an encoder as the options say."""
    from declutr.encoders.loading import load_encoder

    settings = "pooling", "device", "trust_remote_code", "precision", "query_prompt", "document_prompt"
    return load_encoder(name, **{setting: getattr(options, setting) for setting in settings})


def _score_each(options: argparse.Namespace, score: Callable[[str, "SentenceEncoder"], None]) -> list[str]:
    """Load each encoder and score it; return the names of those that could not be, each reported on stderr."""
    failed = []
    # the pretrained one may be among the encoders
    names = dict.fromkeys([*options.encoders, *([options.pretrained] if options.pretrained else [])])
    for name in names:
        try:
            score(name, _load(name, options))
        except (EncoderError, DataError) as error:
            failed.append(name)
            sys.stderr.write(f"not scored: {error}\n")
    if failed and len(names) > 1:
        sys.stderr.write(f"{len(failed)} of {len(names)} encoders were not scored ({', '.join(failed)})\n")
    return failed


def _score_pairs(options: argparse.Namespace) -> int:
    """Score baselines and encoders on the user's pairs; the first that cannot be scored ends the command."""
    from declutr.evaluation.retrieval.pairs import read_test

    hint = "; omit --documents if pairs have `text`" if options.documents else "; with --documents FILE, `id` will do"
    test = read_test(options.pairs, options.documents, hint)  # its problems need not wait for the encoders
    from declutr.encoders.protocol import sizes_of
    from declutr.evaluation.retrieval.compare import score_encoder, score_lexical, write_comparison
    from declutr.evaluation.retrieval.lexicon import Lexicon

    lexicon = Lexicon(test.texts)
    scored, names = score_lexical(test, lexicon), list[str]()
    for name in options.encoders:
        try:
            encoder = _load(name, options)
            if encoder.name not in names:
                scored += score_encoder(test, encoder, lexicon, sizes_of(encoder, options.sizes))
        except EncoderError as error:
            raise EncoderError(f"{name} is not scored: {error}") from error
        names = list(dict.fromkeys([*names, encoder.name]))
    print(write_comparison(test, scored, names, options.output))
    print(f"\n{options.output / 'pairs.json'} has all numbers")
    return 0


def _score_mteb(options: argparse.Namespace) -> int:
    """Score all encoders on MTEB's tasks; return 1 if one could not be scored."""
    from declutr.common.hub import hub_or_cache
    from declutr.encoders.protocol import sizes_of, with_cuts

    if absent := missing_extra("mteb", "--mteb"):
        raise UsageError(absent)
    with hub_or_cache():  # before MTEB's libraries contact the hub
        from declutr.evaluation.mteb import choose_mteb, score_mteb, write_mteb

        scores, tasks = dict[str, dict[str, float]](), choose_mteb(options.mteb.split(","))

        def score(_: str, encoder: "SentenceEncoder") -> None:
            for variant in with_cuts(encoder, sizes_of(encoder, options.sizes)):
                scores[variant.name] = score_mteb(variant, tasks, options.output, _say)
            write_mteb(scores, options.output)

        failed = _score_each(options, score)
    if scores:
        print(f"main scores: {options.output / 'mteb.json'}; all of MTEB's figures: {options.output / 'mteb'}")
    return int(bool(failed))


def _check_and_score(options: argparse.Namespace) -> int:
    """Fetch and check the data of the tasks, and score the encoders on them."""
    data = options.data or options.download
    from declutr.evaluation.senteval.data import inspect, overview
    from declutr.evaluation.senteval.tasks import SETS, STS, TRANSFER, choose_tasks, find

    default = [*STS, *TRANSFER] if options.protocol == "simcse" else ["all"]
    words = options.tasks.split(",") if options.tasks else default
    try:
        names = choose_tasks([word for word in words if not word.lower().startswith("nano")])
    except UsageError as error:
        raise UsageError(f"--tasks: {error}") from error
    if names and options.data and not any((data / part).is_dir() for part in ("downstream", "probing")):
        raise UsageError(f"--data {data}: has neither downstream/ nor probing/; name their folder, or use --download")
    from declutr.evaluation.retrieval import nanobeir  # loads torch, as do the two below
    from declutr.evaluation.senteval.harness import ScoringChoice
    from declutr.evaluation.senteval.network import ClassifierConfig

    tests = nanobeir.read_nanobeir(data, nanobeir.split_names(words)[0])
    for line in nanobeir.overview(tests):
        _say(line)
    failed = False
    if options.download and names:
        from declutr.evaluation.senteval.data import download, transfers

        tasks = names if options.tasks else SETS["all"]
        fetched = download(data, tasks, options.mirror, _say)
        print("\n".join(transfers(fetched, tasks)))
        failed = any(file.outcome == "failed" for file in fetched)
    inspections = [inspect(find(name), data, options.allow_unchecked) for name in names]
    if names:
        _say("\n".join(overview(inspections)))
        failed |= any(inspection.standing == "refused" for inspection in inspections)
        failed |= not any(inspection.usable for inspection in inspections)
    classifier = ClassifierConfig() if options.preset == "official" else ClassifierConfig.prototyping()
    choice = ScoringChoice(protocols=_PROTOCOLS[options.protocol], classifier=classifier)
    if options.encoders or options.pretrained:
        failed |= bool(tests) and not _score_nanobeir(options, tests)
        failed |= bool(names) and not _score_senteval(options, inspections, choice)
    return int(failed)


def _score_nanobeir(options: argparse.Namespace, tests: Sequence["NanoTest"]) -> bool:
    """Score encoders on tests of NanoBEIR and write the table; return whether every encoder was scored."""
    from declutr.encoders.protocol import sizes_of
    from declutr.evaluation.retrieval.nanobeir import score_nanobeir, write_nanobeir

    scored, table = dict[str, Any](), ""

    def score(name: str, encoder: "SentenceEncoder") -> None:
        nonlocal table
        for size, means in score_nanobeir(encoder, tests, sizes_of(encoder, options.sizes), _say).items():
            scored[name if size == encoder.size else f"{name} [{size}]"] = means
        table = write_nanobeir(tests, scored, options.output)

    failed = _score_each(options, score)
    if table:
        print(f"\n{table}\n{options.output / 'nanobeir.json'} has all measures")
    return not failed


def _score_senteval(options: argparse.Namespace, inspections: Sequence["Inspection"], choice: "ScoringChoice") -> bool:
    """Score all encoders on SentEval's tasks and write the tables; return whether every encoder was scored."""
    from declutr.common.cluster import SessionConfig
    from declutr.common.lock import RunLock
    from declutr.encoders.protocol import sizes_of, with_cuts
    from declutr.evaluation.senteval.harness import evaluate
    from declutr.evaluation.tables import write_tables
    from declutr.report.page import write_scores_page

    if not any(inspection.usable for inspection in inspections):
        sys.stderr.write("nothing was scored: the chosen tasks have no usable data\n")
        return False
    session = SessionConfig(num_cpus=options.cpus, address=options.address)
    evaluated, table = list["Evaluated"](), ""
    options.output.mkdir(parents=True, exist_ok=True)
    page = options.output / "scores.html"
    lack = missing_extra("report", f"{page} is not written")

    def score(name: str, encoder: "SentenceEncoder") -> None:
        nonlocal table
        if unused := getattr(encoder, "unused", ()):
            _say(f"{name}: its files also contain parts that embeddings do not use: {', '.join(unused)}")
        variants = with_cuts(encoder, sizes_of(encoder, options.sizes))
        of_sizes = [
            evaluate(variant, inspections, choice, options.output, session, _say, whole=encoder) for variant in variants
        ]
        if options.pretrained:
            of_sizes = [replace(scored, pretrained=options.pretrained) for scored in of_sizes]
        evaluated.extend(of_sizes)
        table = write_tables(evaluated, options.output)  # after each encoder, so that a long call can be watched
        if lack is None:
            write_scores_page(evaluated, page)
        if not any(report.results for scored in of_sizes for report in scored.reports.values()):
            raise EncoderError(f"{name}: no task has a score; the table gives the reasons")

    # another call would remove embeddings that this one reads, and replace its tables
    with RunLock(options.output, lambda: _say(f"{options.output}: another command has taken over")):
        failed = _score_each(options, score)
    if evaluated:
        compared = f"{page} compares with published numbers; also: scores.md, scores.json"
        if lack is not None:
            page.unlink(missing_ok=True)  # it would show earlier scores
            compared = f"{page.with_suffix('.md')} compares with published numbers; also: scores.json. {lack}"
        print(f"\n{table}\n{compared}")
    return not failed
