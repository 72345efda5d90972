"""Checks of an adaptation before any work, in the words of the command's options."""

import glob
import logging
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from declutr.adaptation.config import (
    DOCUMENTS,
    ENCODER,
    PAIRS_DATA,
    PAIRS_FILE,
    REPORT,
    STATE,
    AdaptConfig,
    document_lines,
    stored,
)
from declutr.common.bootstrap import MIN_ROWS
from declutr.common.cluster import cluster_problem, named_cluster
from declutr.common.console.logs import get_logger
from declutr.common.console.terminal import excerpt
from declutr.common.errors import ConfigError, DataError, ShardError, UsageError
from declutr.common.lock import RunLock
from declutr.common.paths import expand, folder_problem
from declutr.common.storage import read_json, write_text
from declutr.common.stores.copies import PLAN
from declutr.encoders.protocol import is_run, no_encoder, unloadable
from declutr.evaluation.retrieval.pairs import Part, RetrievalTest, read_passages, read_test
from declutr.pipeline.config import PipelineConfig, found_again
from declutr.pipeline.job.outcome import lines_hint, nothing_kept
from declutr.pipeline.job.units import UnitReader, fit_units, plan_units
from declutr.pipeline.readers.corpus import ReadFailure
from declutr.pipeline.readers.skipped import Skipped
from declutr.pipeline.shards.ledger import Counts
from declutr.pipeline.shards.windows import TOO_SHORT, shortest_document
from declutr.trainer.metrics.judged_pairs import STSB_TEST, read_pairs

_OWN = {"data", DOCUMENTS, PAIRS_FILE, PAIRS_DATA, "candidates", "folds", "scores", ENCODER, REPORT}
_OWN |= {"result.json", "lock.json"}  # names that an adaptation writes to its folder, beside its state
_WRITTEN = [PAIRS_FILE, REPORT, "result.json", f"{ENCODER}/README.md", "candidates/run/export/README.md"]
_WRITTEN += ["folds/0/data/plan.json"]
"""Files of every format that documents may have; `prepare` looks for those of the data itself."""
_ANSWERS = {2: 240, 3: 370}  # by number of parts: answers of which each part has MIN_ROWS in 99% of the draws
_MOST_READ = 1000  # documents whose lengths are looked at before a preparation
# Patterns in messages of `prepare`, with the words of this command for each.
_OPTIONS: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"^prepare: ": "",
    r"set corpus\.format=": "add --format ",
    r"set corpus\.text_field to the key or column of the text, or to several, as in corpus\.text_field=\[.*?\]": (
        "--text-field names the key or column of the text, once for each of several"
    ),
    r"corpus\.paths(?: =)?": "CORPUS",
    r"corpus\.(?:format|text_field)": lambda match: f"--{match[0][7:].replace('_', '-')}",
    r" = 2 \* geometry\.max_tokens \(\d+\)|2 \* geometry\.max_tokens \(\d+\) = ": "",
    r"; lower one of them or use longer documents": "; use longer documents, or join short ones",
    r"(?: and|,) `filters`": "",
    r"output = (.+?)/data(?=['\s:])": r"--output \1",
    r"output = ": "--output ",
    r"^(?:session\.|scaling\.)?address = ": "--address ",
    r"and prepare into a new folder, or allow more with max_error_rate=[\d.]+; the same command then ends at once": (
        "and name another --output, or leave out what cannot be read with --skip-bad"
    ),
    r"more than max_error_rate = \d+(?:\.\d+)?": "more than 1%",
    r"tokenizer\.name = ": "ENCODER ",
    r", delete this one, or prepare new files alone, as `data` takes a list": ", or delete this one",
    r", or in `prepare` tokenizer\.kind=train": "",
}


def as_options(message: str) -> str:
    """A message of `prepare` with options of `adapt` in place of settings."""
    for pattern, words in _OPTIONS.items():
        message = re.sub(pattern, words, message)
    return message


@contextmanager
def own_words() -> Iterator[None]:
    """Gives messages and errors of `prepare` and `train` the options of `adapt`, which takes no settings."""

    def reworded(record: logging.LogRecord) -> bool:
        record.msg, record.args = as_options(record.getMessage()), ()  # `getMessage` has put the arguments in
        return "into its next pass" not in record.msg  # the batch of `adapt` is no option

    get_logger().addFilter(reworded)
    try:
        yield
    except ConfigError as error:
        raise ConfigError("adapt", [as_options(problem) for problem in error.problems]) from error
    except ShardError as error:
        raise ShardError(as_options(str(error))) from error
    finally:
        get_logger().removeFilter(reworded)


def check_lengths(config: PipelineConfig, tokenizer: Any) -> None:
    """Looks for a long document in a small corpus, because a preparation takes a minute to say that there is none."""
    shortest_kept = shortest_document(config.geometry, config.short_documents)
    units, _ = plan_units(config.corpus, config.unit_mib)
    records = (record for unit in units for record in UnitReader(unit, config.corpus))
    failed, sources = list[ReadFailure](), dict[str, None]()
    read = longest = 0  # a corpus may hold no record
    for read, record in enumerate(records, 1):
        sources[record.source] = None
        if isinstance(record, ReadFailure):
            failed.append(record)
        else:
            longest = max(longest, len(tokenizer(record.text, add_special_tokens=False)["input_ids"]))
        if longest >= shortest_kept or read > _MOST_READ:
            return
    reasons = dict(Counter(failure.reason for failure in failed))
    dropped = {TOO_SHORT: read - len(failed)} if read > len(failed) else {}
    counts = Counts(read=read, kept=0, dropped=dropped, failed=reasons, text_bytes=0, longest_tokens=longest)
    problems = nothing_kept(counts, config, failed), lines_hint(read, dropped, config.model_dump(mode="json"), sources)
    raise ConfigError("adapt", [as_options(problem) for problem in problems if problem])


def _place_problems(config: AdaptConfig, output: Path) -> Iterator[str]:
    """Problems of the paths of encoder, corpus and output, such as an output within the corpus."""
    is_baseline = config.encoder.startswith(("hashed-words", "untrained:", "untrained@", "words:"))
    place = Path() if is_baseline else expand(config.encoder)
    encoder_problem = unloadable(config.encoder) or no_encoder(place)
    if is_run(place):
        encoder_problem = f"{place} is a run or a checkpoint; name the folder `export` of a run"
    if place.is_file():
        encoder_problem = f"{place} is a file, not the folder of an encoder"
    if is_baseline:
        encoder_problem = f"{config.encoder} is a baseline, whose weights nobody trained; name the folder of an encoder"
    if encoder_problem:
        encoders = [path for path in config.corpus if (Path(path) / "config.json").is_file()]
        if encoders:
            encoder_problem += f". {encoders[0]} is an encoder, which comes first: declutr adapt ENCODER CORPUS"
        yield encoder_problem
    if problem := folder_problem(output):
        yield f"--output {output}: {problem}"
    if output.is_dir() and not (output / STATE).is_file():
        if others := sorted({path.name for path in output.iterdir() if not path.name.startswith(".")} - _OWN):
            yield f"--output {output}: holds {excerpt(others)}, not an adaptation; name a new folder"
        if (output / ENCODER).exists():  # "better" would replace it, every other verdict remove it
            yield f"--output {output}: its folder {ENCODER} is not of an adaptation; name another folder"
    for path in (Path(path).resolve() for path in config.corpus if "://" not in path):
        if not path.exists() and not glob.has_magic(str(path)):
            yield f"CORPUS: {path}: no such file or folder"
        if (path / "modules.json").is_file():
            yield f"CORPUS: {path}: is an encoder; name documents"
    yield from (f"--output {output}: {problem}" for problem in found_again(str(output), config.corpus, _WRITTEN))


class Inputs(NamedTuple):
    """What the user's own files hold."""

    pairs: RetrievalTest | None = None
    passages: dict[str, list[str]] | None = None  # by the text of their document


def check_places(config: AdaptConfig, output: Path, address: str | None) -> tuple[list[str], Inputs]:
    """Problems of the user's own files and the cluster, and what the files hold; loads neither torch nor Ray."""
    places, problems, pairs, passages = [*_place_problems(config, output)], list[str](), None, None
    problems += map(as_options, filter(None, [cluster_problem(*named_cluster(address))]))
    if config.passages is not None:
        try:
            passages = read_passages(expand(config.passages))
        except DataError as error:
            places.append(str(error))
    if config.pairs is not None:
        try:
            pairs = read_test(expand(config.pairs))
            parts: tuple[Part, ...] = ("test", "development", "train") if config.train_on_pairs else ("test",)
            counts = {part: pairs.part(part, config.seed, config.train_on_pairs).num_answers for part in parts}
            if few := {part: count for part, count in counts.items() if count < MIN_ROWS}:
                part, num_answers = next(iter(few.items()))
                problems.append(
                    f"--pairs {config.pairs}: {num_answers} different answers are left for the {part}, which needs "
                    f"{MIN_ROWS}, and queries with an answer in common count once; give queries of "
                    f"{_ANSWERS[2 + config.train_on_pairs]} answers or more, or none to use passages of the documents"
                )
        except DataError as error:
            problems.append(f"--pairs {str(error).removeprefix('--pairs ')}")
    elif config.train_on_pairs:
        problems.append("--train-on-pairs: needs --pairs FILE")
    if config.train_on_pairs and config.steps == 0:
        problems.append("--train-on-pairs: --steps 0 trains nothing; remove one of them")
    if config.stsb is not None:
        try:
            if (count := len(read_pairs(expand(config.stsb), STSB_TEST))) < MIN_ROWS:
                problems.append(f"--stsb {config.stsb}: {count} pairs; an interval needs {MIN_ROWS}")
        except DataError as error:
            problems.append(f"--stsb: {error}")
    if places:  # the corpus is read with the encoder's tokenizer
        raise UsageError("\n".join([*places, *problems]))
    return problems, Inputs(pairs, passages)


def corpus_problems(config: AdaptConfig) -> list[str]:
    """Problems of the files of the corpus, such as a missing column, without the encoder."""
    if not config.corpus:
        return []
    plan = config.prepare_config(Path("data"))
    return [*map(as_options, fit_units(plan.corpus, plan.unit_mib, Skipped(), plan.content)[2])]


def _write_documents(config: AdaptConfig, output: Path, passages: Iterable[str]) -> None:
    """Writes the documents that passages make together, unless the folder has them."""
    path, lines = output / DOCUMENTS, document_lines(passages)
    if path.is_file() and path.read_bytes() == lines.encode():
        with RunLock(output, lambda: None):  # a command at the other path may be reading them
            drop_moved(output / "data", path)
        return
    if path.is_file() and (output / STATE).is_file():
        raise UsageError(
            f"--passages {config.passages}: has changed since this adaptation began; restore it, or name another "
            "folder in --output"
        )
    output.mkdir(parents=True, exist_ok=True)
    with RunLock(output, lambda: None):
        write_text(path, lines)


def drop_moved(data: Path, documents: Path) -> None:
    """Removes shards prepared before their adaptation was moved: `prepare` counts its input's path as a setting."""
    if (data / PLAN).is_file() and read_json(data / PLAN)["config"]["corpus"]["paths"] != [str(documents)]:
        shutil.rmtree(data)


def checked(config: AdaptConfig, output: Path, address: str | None) -> Inputs:
    """Checks everything and returns the user's own files. Writes documents joined from passages to the output."""
    problems, inputs = check_places(config, output, address)
    stored(config, output)  # refuses a folder with another adaptation, in words of this command's options
    if inputs.passages is not None:
        _write_documents(config, output, inputs.passages)
    from declutr.pipeline.prepare import problems as preparation_problems  # loads Ray

    with own_words():  # it warns of files that are not read
        preparation = preparation_problems(config.prepare_config(output / "data", address))
    if problems := [*map(as_options, preparation), *problems]:
        raise UsageError("\n".join(problems))
    return inputs
