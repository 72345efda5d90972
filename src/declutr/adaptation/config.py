"""Settings of `declutr adapt`: configurations that follow from them, checks before any work, the state in the folder.

Messages of a preparation are given the words of this command's options. `configs/adapt.yaml` has the settings of
preparation and training, so that both can be run alone too.
"""

import glob
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, PrivateAttr, ValidationError

from declutr.common.bootstrap import MIN_ROWS
from declutr.common.config import Strict
from declutr.common.console.logs import get_logger
from declutr.common.console.terminal import excerpt
from declutr.common.errors import ConfigError, DataError, ShardError, UsageError
from declutr.common.paths import expand, folder_problem
from declutr.common.storage import write_text
from declutr.common.yamlfile import read_yaml_file
from declutr.encoders.protocol import missing, no_encoder
from declutr.evaluation.retrieval.pairs import Part, RetrievalTest, read_test
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.job.outcome import lines_hint, nothing_kept
from declutr.pipeline.job.units import plan_units, read_unit
from declutr.pipeline.readers.corpus import Choice, ReadFailure
from declutr.pipeline.shards.ledger import Counts
from declutr.pipeline.shards.windows import TOO_SHORT, shortest_document
from declutr.trainer.config import TrainConfig
from declutr.trainer.metrics.judged_pairs import STSB_TEST, read_pairs

PASSAGE_TOKENS = 62  # two fewer than a window of the shards, for the special tokens
"""Tokens of a passage without special ones."""
WINDOW_TOKENS = 64
"""Tokens of a window of the shards, `geometry.max_tokens` of `configs/adapt.yaml`."""
FAR_TOKENS = PASSAGE_TOKENS + 96  # `min_distance_tokens` of configs/adapt.yaml
"""Tokens between the starts of two passages of which one must find the other."""
LONG_TOKENS = (1 - (-FAR_TOKENS // WINDOW_TOKENS)) * WINDOW_TOKENS
"""Tokens of the shortest document with two such passages: 256, because passages start with windows."""
HELD_OUT = 0.4  # so that 500 documents give the 100 test rows of an interval
"""Share of the documents that is not trained on: half of it chooses, the other half reports."""
BATCH_DOCUMENTS = 64  # `batch_documents` of configs/adapt.yaml
STATE = "state.json"
_SETTINGS = Path(__file__).resolve().parent.parent / "configs" / "adapt.yaml"


class AdaptConfig(Strict):
    """Settings of an adaptation."""

    encoder: str
    """Folder or name of the encoder to start from."""
    corpus: list[str] = Field(min_length=1)
    """Files, folders or globs of documents."""
    format: Choice = "auto"
    """Format of the corpus, as `corpus.format` of `prepare`."""
    text_field: list[str] = Field(default=["text"], min_length=1)
    """Column or columns with the text of a document."""
    pairs: str | None = None
    """File with the user's own queries and answers (`declutr evaluate --pairs`); it becomes the primary measure."""
    train_on_pairs: bool = False
    """Train on a third of the pairs, too; the others choose and judge."""
    stsb: str | None = None
    """Folder of STS-B with sts-test.csv, to measure what was lost in general."""
    minutes: float = Field(default=30, gt=0, le=10_000)
    """Time for everything, also over several starts of the command; it decides the number of training steps."""
    steps: int | None = Field(default=None, ge=0)
    """Steps of the training; null: ten passes over the documents, or as many as there is time for. 0: none, so that
    only the closed form is tried."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the split, the training and the intervals."""
    private: bool = False
    """Write no text of the documents to the report."""
    trust_remote_code: bool = False
    """Run Python code that comes with the encoder. Only for encoders you trust."""

    def located(self) -> "AdaptConfig":
        """The settings with absolute paths, because workers run in other folders.

        Raises:
            UsageError: a path that cannot exist.
        """

        def absolute(path: str | None) -> str | None:
            return path and str(expand(path).absolute())

        places: dict[str, Any] = {"pairs": absolute(self.pairs), "stsb": absolute(self.stsb)}
        places["corpus"] = [path if "://" in path else absolute(path) for path in self.corpus]
        if expand(self.encoder).is_dir():  # else it is a name at the hub
            places["encoder"] = absolute(self.encoder)
        return self.model_copy(update=places)

    def prepare_config(self, output: Path, address: str | None = None) -> PipelineConfig:
        """The preparation of the corpus with the encoder's tokenizer: documents of at least two windows."""
        field = self.text_field[0] if len(self.text_field) == 1 else self.text_field
        settings = read_yaml_file(_SETTINGS)["prepare"] | {
            "output": str(output),
            "corpus": {"kind": "files", "paths": self.corpus, "format": self.format, "text_field": field},
            "tokenizer": {"kind": "pretrained", "name": self.encoder, "trust_remote_code": self.trust_remote_code},
            "validation_fraction": HELD_OUT,  # half of it chooses, half reports
            "session": {"address": address},
            "seed": self.seed,
        }
        return PipelineConfig.model_validate(settings)

    def prepare_pairs_config(self, pairs: Path, output: Path, address: str | None = None) -> PipelineConfig:
        """The preparation of the pairs that are trained on, with the encoder's tokenizer."""
        settings = {
            "output": str(output),
            "corpus": {"kind": "files", "paths": [str(pairs)]},
            "content": {"kind": "pairs", "premise": "query", "hypothesis": "text", "label": None},
            "tokenizer": {"kind": "pretrained", "name": self.encoder, "trust_remote_code": self.trust_remote_code},
            "validation_fraction": 0,
            "session": {"address": address},
            "seed": self.seed,
        }
        return PipelineConfig.model_validate(settings)

    def train_config(
        self,
        data: Path,
        run: Path,
        steps: int,
        pooling: str,
        prompts: tuple[str, str],
        address: str | None = None,
        pairs: tuple[Path, int] | None = None,
    ) -> TrainConfig:
        """The training: one anchor a document, with a positive far from it, or as short as a query, beside its answer.

        Args:
            data: the prepared corpus.
            run: folder of the run.
            steps: number of optimizer steps.
            pooling: of the encoder.
            prompts: before queries, and before all other spans.
            address: of a Ray cluster.
            pairs: shards of the user's pairs and their number of rows, which each step trains on, too.
        """
        file = read_yaml_file(_SETTINGS)["train"]
        names = ("spans", "objective", "optim", "batch_documents", "microbatch_tokens")
        encoder = {"pretrained": self.encoder, "trust_remote_code": self.trust_remote_code}
        encoder |= {"pooling": pooling, "query_prompt": prompts[0], "prompt": prompts[1]}
        settings = {name: file[name] for name in names} | {
            "run": str(run),
            "data": str(data),
            "encoder": file["encoder"] | encoder,
            "steps": steps,
            "seed": self.seed,
            "validation": {"every_steps": 0},  # candidates are scored by passages, and the last weights are one
            "scaling": {"num_workers": 1, "cpus_per_worker": 2 if address else os.cpu_count() or 1, "address": address},
        }
        if pairs is not None:
            temperature = file["objective"]["loss"]["temperature"]
            objective = {"kind": "simcse", "supervised": True, "hard_negatives": False, "head": False}
            objective |= {"temperature": temperature, "max_tokens": WINDOW_TOKENS}
            rows = min(BATCH_DOCUMENTS, pairs[1])
            task = {"data": str(pairs[0]), "objective": objective, "batch_documents": rows}
            settings |= {"auxiliary_tasks": {"pairs": task}, "task_schedule": "joint"}
        return TrainConfig.model_validate(settings)


class State(Strict):
    """What an adaptation remembers of all starts of the command; every change is written at once."""

    model_config = ConfigDict(frozen=False)  # it changes during an adaptation, and is written at each change

    config: AdaptConfig
    start: str | None = None
    """Fingerprint of the start."""
    seconds: float = 0.0
    """Time used by all starts until the last change."""
    steps: int | None = None
    """Steps of the training, once they are decided."""
    looks: list[str] = Field(default_factory=list)
    """Looks at the test."""
    _path: Path = PrivateAttr()
    _began: float = PrivateAttr(default_factory=time.monotonic)

    @property
    def seconds_used(self) -> float:
        """Time used by all starts of the command."""
        return self.seconds + time.monotonic() - self._began

    @property
    def seconds_left(self) -> float:
        """Time left of `--minutes`."""
        return max(0.0, 60 * self.config.minutes - self.seconds_used)

    def check(self, start: str) -> None:
        """Compares the fingerprint of the start with that of earlier starts of the command.

        Raises:
            UsageError: an earlier start of the same adaptation had another one.
        """
        if self.start not in (None, start):
            raise UsageError(
                f"--output {self._path.parent}: the encoder has changed since this adaptation began; name another "
                "folder"
            )

    def look(self, what: str) -> int:
        """Counts a look at the test documents, and returns the number of looks. The same look again counts once."""
        self.write(looks=list(dict.fromkeys([*self.looks, what])))  # the same test again is no new chance to be lucky
        return len(self.looks)

    def write(self, **changes: object) -> None:
        """Writes the file with these changes and the time used until now."""
        self.seconds, self._began = self.seconds_used, time.monotonic()
        for name, value in changes.items():
            setattr(self, name, value)
        write_text(self._path, self.model_dump_json(indent=1) + "\n")


@contextmanager
def opened(config: AdaptConfig, output: Path) -> Iterator[State]:
    """The state of the folder, new or of an earlier start of the same adaptation.

    Raises:
        UsageError: the folder is of another adaptation, or its file is damaged.
    """
    path = output / STATE
    try:
        state = State.model_validate_json(path.read_bytes()) if path.is_file() else State(config=config)
    except ValidationError as error:
        raise UsageError(
            f"{path} is damaged: delete it and the folders candidates and encoder, and the same command begins again"
        ) from error
    free = {"minutes": config.minutes, "stsb": config.stsb, "private": config.private}  # a later start may have others
    before, after = state.config.model_copy(update=free).model_dump(), config.model_dump()
    if differing := [name for name in after if before[name] != after[name]]:
        raise UsageError(
            f"--output {output}: holds an adaptation with another {', '.join(differing)}; name another folder"
        )
    state.config, state._path = config, path
    try:
        yield state
    finally:
        if path.is_file():  # not before the corpus is prepared: until then another one may be named
            state.write()  # also after a failure: --minutes counts the time of all starts


ENCODER, REPORT = "encoder", "report.html"
PAIRS_FILE, PAIRS_DATA = "pairs.jsonl", "pairs"
"""Names of the pairs that are trained on, in the output folder: as a file, and as shards."""
_OWN = {"data", PAIRS_FILE, PAIRS_DATA, "candidates", "scores", ENCODER, REPORT, "result.json", "lock.json"}
"""Names that an adaptation writes to its folder, beside its state."""
_ANSWERS = {2: 240, 3: 370}
"""Different answers of which each half, or each third, has 100 in 99% of the draws."""
_MOST_READ = 1000
"""Documents whose lengths are looked at before a preparation."""
_OPTIONS: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"^prepare: ": "",
    r"set corpus\.format=": "add --format ",
    r"set corpus\.text_field to the key or column of the text, or to several, as in corpus\.text_field=\[.*?\]": (
        "--text-field names the key or column of the text, once for each of several"
    ),
    r"corpus\.paths(?: = )?": "CORPUS ",
    r"corpus\.(?:format|text_field)": lambda match: f"--{match[0][7:].replace('_', '-')}",
    r" = 2 \* geometry\.max_tokens \(\d+\)|2 \* geometry\.max_tokens \(\d+\) = ": "",
    r"; lower one of them or use longer documents": "; use longer documents, or join short ones",
    r"(?: and|,) `filters`": "",
    r"output = ": "--output ",
}
"""Patterns in messages of a preparation, and the words of this command for them."""


def as_options(message: str) -> str:
    """A message of `prepare` with options of `adapt` in place of settings."""
    for pattern, words in _OPTIONS.items():
        message = re.sub(pattern, words, message)
    return message.replace("CORPUS :", "CORPUS:")  # of `corpus.paths:`, which names no value


@contextmanager
def own_words() -> Iterator[None]:
    """Gives messages and errors of `prepare` the options of `adapt`, which takes no settings."""

    def reworded(record: logging.LogRecord) -> bool:
        record.msg, record.args = as_options(record.getMessage()), ()  # the message has them already
        return True

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
    """Looks for a long document in a small corpus, because a preparation takes a minute to say that there is none.

    Raises:
        ConfigError: all documents are too short, or none can be read.
    """
    least, longest, failed = shortest_document(config.geometry, config.short_documents), 0, list[ReadFailure]()
    units, _ = plan_units(config.corpus, config.unit_mib)
    records = (record for unit in units for record in read_unit(unit, config.corpus))
    read, sources = 0, dict[str, None]()  # 0, because a corpus may hold no record
    for read, record in enumerate(records, 1):
        sources[record.source] = None
        if isinstance(record, ReadFailure):
            failed.append(record)
        else:
            longest = max(longest, len(tokenizer(record.text, add_special_tokens=False)["input_ids"]))
        if longest >= least or read > _MOST_READ:
            return
    reasons, short = dict(Counter(failure.reason for failure in failed)), {TOO_SHORT: read - len(failed)}
    dropped = short if read > len(failed) else {}
    counts = Counts(read=read, kept=0, dropped=dropped, failed=reasons, text_bytes=0, longest_tokens=longest)
    problems = nothing_kept(counts, config, failed), lines_hint(read, dropped, config.model_dump(mode="json"), sources)
    raise ConfigError("adapt", [as_options(problem) for problem in problems if problem])


def _place_problems(config: AdaptConfig, output: Path) -> Iterator[str]:
    """The reasons why encoder, corpus or output cannot be where they are, such as an output within the corpus."""
    place = expand(config.encoder)
    encoder_problem = missing(config.encoder) or no_encoder(place)
    if place.is_file():
        encoder_problem = f"{place} is a file, not the folder of an encoder"
    if config.encoder.startswith(("hashed-words", "untrained:", "untrained@")):
        encoder_problem = f"{config.encoder} is a baseline, whose weights nobody trained; name the folder of an encoder"
    if encoder_problem:
        others = [path for path in config.corpus if (Path(path) / "config.json").is_file()]
        if others:
            encoder_problem += f". {others[0]} is an encoder, and the encoder comes first: declutr adapt ENCODER CORPUS"
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
        if output.resolve().is_relative_to(path):
            yield f"--output {output}: is in the corpus {path}, whose files are documents; name a folder elsewhere"


def check_places(config: AdaptConfig, output: Path) -> tuple[list[str], RetrievalTest | None]:
    """Problems of the files of pairs, and the user's pairs; loads neither torch nor Ray.

    Raises:
        UsageError: encoder, corpus or output cannot be there; with the problems of the files.
    """
    places, problems, pairs = [*_place_problems(config, output)], list[str](), None
    if config.pairs is not None:
        try:
            pairs = read_test(expand(config.pairs))
            parts: tuple[Part, ...] = ("test", "development", "train") if config.train_on_pairs else ("test",)
            counts = {part: pairs.part(part, config.seed, config.train_on_pairs).num_answers for part in parts}
            if few := {part: count for part, count in counts.items() if count < MIN_ROWS}:
                part, reporting = next(iter(few.items()))
                problems.append(
                    f"--pairs {config.pairs}: {reporting} different answers are left for the {part}, which needs "
                    f"{MIN_ROWS}, and queries with an answer in common count once; give queries of "
                    f"{_ANSWERS[2 + config.train_on_pairs]} answers or more, or none to use passages of the documents"
                )
        except DataError as error:
            problems.append(str(error))
    elif config.train_on_pairs:
        problems.append("--train-on-pairs: needs --pairs FILE")
    if config.stsb is not None:
        try:
            if (count := len(read_pairs(expand(config.stsb), STSB_TEST))) < MIN_ROWS:
                problems.append(f"--stsb {config.stsb}: {count} pairs; an interval needs {MIN_ROWS}")
        except DataError as error:
            problems.append(f"--stsb: {error}")
    if places:  # the corpus is read with the encoder's tokenizer
        raise UsageError("\n".join([*places, *problems]))
    return problems, pairs


def checked(config: AdaptConfig, output: Path, address: str | None) -> RetrievalTest | None:
    """The user's pairs.

    Raises:
        UsageError: all problems of encoder, corpus and files that can be found before any work.
    """
    problems, pairs = check_places(config, output)
    from declutr.pipeline.prepare import problems as preparation_problems  # loads Ray

    with own_words():  # it warns of files that are not read
        preparation = preparation_problems(config.prepare_config(output / "data", address))
    if problems := [*map(as_options, preparation), *problems]:
        raise UsageError("\n".join(problems))
    return pairs
