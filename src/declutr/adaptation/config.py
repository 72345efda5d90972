"""Settings of `declutr adapt`: configurations that follow from them, checks before any work, the state in the folder.

Messages of a preparation are given the words of this command's options. `configs/adapt.yaml` has the settings of
preparation and training, so that both can be run alone too.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from declutr.common.config import Strict
from declutr.common.errors import UsageError
from declutr.common.paths import expand, expand_known
from declutr.common.storage import write_text
from declutr.common.yamlfile import read_yaml_file
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.readers.corpus import Choice
from declutr.trainer.config import TrainConfig

HELD_OUT = 0.4  # so that 500 documents give the 100 test rows of an interval
"""Share of the documents that is not trained on: half of it chooses, the other half reports."""
BATCH_DOCUMENTS = 64  # `batch_documents` of configs/adapt.yaml
STATE = "state.json"
ENCODER, REPORT = "encoder", "report.html"
PAIRS_FILE, PAIRS_DATA = "training-pairs.jsonl", "pairs"  # names of no file of the user: they are replaced
"""Names of the pairs that are trained on, in the output folder: as a file, and as shards."""
DOCUMENTS = "documents-of-passages.jsonl"  # a name that no file of the user has, because it is replaced
"""Name of the documents of `--passages` in the output folder, and of those of a fold in its folder."""
APART = 96  # `min_distance_tokens` of configs/adapt.yaml
"""Tokens between two passages of which one must find the other."""
_SETTINGS = Path(__file__).resolve().parent.parent / "configs" / "adapt.yaml"


@dataclass(frozen=True)
class Lengths:
    """Tokens of passages, and what follows from them."""

    passage: int = 62  # of a passage without special ones

    @property
    def window(self) -> int:
        """Of a window of the shards, `geometry.max_tokens`: two more, for special ones."""
        return self.passage + 2

    @property
    def far(self) -> int:
        """Between the starts of two passages of which one must find the other."""
        return self.passage + APART

    @property
    def long(self) -> int:
        """Of the shortest document with two such passages (256 of 62): passages start with windows."""
        return (1 - (-self.far // self.window)) * self.window


LENGTHS = Lengths()  # those of the defaults


class AdaptConfig(Strict):
    """Settings of an adaptation."""

    encoder: str  # folder or name of the encoder to start from
    corpus: list[str] = Field(default_factory=list)  # files, folders or globs of documents
    # Own passages in place of a corpus, of which `document` names the document: they choose and judge as they are.
    passages: str | None = None
    format: Choice = "auto"  # format of the corpus, as `corpus.format` of `prepare`
    text_field: list[str] = Field(default=["text"], min_length=1)  # column or columns with the text of a document
    # File with the user's own queries and answers (`declutr evaluate --pairs`); it becomes the primary measure.
    pairs: str | None = None
    train_on_pairs: bool = False  # train on a third of the pairs, too; the others choose and judge
    stsb: str | None = None  # folder of STS-B with sts-test.csv, to measure what was lost in general
    # Tokens of a passage: of those that train, choose and judge.
    passage_tokens: int = Field(default=LENGTHS.passage, ge=30, le=8190)
    # They decide the number of training steps, and count over several starts of the command.
    minutes: float = Field(default=30, gt=0, le=10_000)
    # Steps of the training; null: twenty passes over the documents, or as many as there is time for. 0: none, so that
    # only the closed form is tried.
    steps: int | None = Field(default=None, ge=0)
    seed: int = Field(default=0, ge=0, lt=2**63)  # seed of the split, the training and the intervals
    skip_bad: bool = False  # leave out documents that cannot be read, however many
    private: bool = False  # write no text of the documents to the report
    # Run Python code that comes with the encoder. Only for encoders you trust.
    trust_remote_code: bool = Field(default=False, strict=True)

    @model_validator(mode="after")
    def _check_documents(self) -> "AdaptConfig":
        if bool(self.corpus) == bool(self.passages):
            raise ValueError("name files or folders of documents (CORPUS), or --passages FILE, one of the two")
        if self.passages and (self.format, self.text_field) != ("auto", ["text"]):
            raise ValueError("--format and --text-field are of CORPUS; --passages has columns `text` and `document`")
        return self

    @property
    def lengths(self) -> Lengths:
        """Tokens of passages."""
        return Lengths(self.passage_tokens)

    def located(self) -> "AdaptConfig":
        """The settings with absolute paths, because workers run in other folders."""

        def absolute(path: str | None) -> str | None:
            return path and str(expand(path).absolute())

        places: dict[str, Any] = {name: absolute(getattr(self, name)) for name in ("pairs", "stsb", "passages")}
        places["corpus"] = [path if "://" in path else absolute(path) for path in self.corpus]
        if expand_known(self.encoder).is_dir():  # else it is a name at the hub
            places["encoder"] = absolute(self.encoder)
        return self.model_copy(update=places)

    def prepare_config(self, output: Path, address: str | None = None, held_out: float = HELD_OUT) -> PipelineConfig:
        """The preparation of the corpus with the encoder's tokenizer: documents of at least two windows."""
        field = self.text_field[0] if len(self.text_field) == 1 else self.text_field
        corpus: dict[str, Any] = {"paths": self.corpus, "format": self.format, "text_field": field}
        if self.passages is not None:
            # the largest limit: a document that is cut has not the text by which its passages are found
            corpus = {"paths": [str(output.parent / DOCUMENTS)], "max_document_mib": 512}
        settings = read_yaml_file(_SETTINGS)["prepare"] | {
            "output": str(output),
            "corpus": {"kind": "files"} | corpus,
            "tokenizer": {"kind": "pretrained", "name": self.encoder, "trust_remote_code": self.trust_remote_code},
            "validation_fraction": held_out,
            "session": {"address": address},
            "seed": self.seed,
        }
        if self.skip_bad:
            settings["max_error_rate"] = 1
        settings["geometry"] |= {"max_tokens": self.lengths.window}
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
        data: Path,  # the prepared corpus
        run: Path,  # folder of the run
        steps: int,  # number of optimizer steps
        pooling: str,  # of the encoder
        prompts: tuple[str, str],  # before queries, and before all other spans
        address: str | None = None,  # of a Ray cluster
        # shards of the user's pairs and their number of rows, which each step trains on, too.
        pairs: tuple[Path, int] | None = None,
    ) -> TrainConfig:
        """A training: one anchor a document, with a positive far from it, or as short as a query, beside its answer."""
        file = read_yaml_file(_SETTINGS)["train"]
        names = ("spans", "objective", "optim", "batch_documents", "microbatch_tokens")
        encoder = {"pretrained": self.encoder, "trust_remote_code": self.trust_remote_code}
        encoder |= {"pooling": pooling, "prompt": prompts[1]}
        if pairs is not None or file["spans"].get("query_share"):  # refused where nothing is a query
            encoder["query_prompt"] = prompts[0]
        settings = {name: file[name] for name in names} | {
            "run": str(run),
            "data": str(data),
            "encoder": file["encoder"] | encoder,
            "steps": steps,
            "seed": self.seed,
            "validation": {"every_steps": 0},  # candidates are scored by passages, and the last weights are one
            "scaling": {"num_workers": 1, "cpus_per_worker": 2 if address else os.cpu_count() or 1, "address": address},
        }
        window = self.lengths.window
        settings["spans"] |= {"min_tokens": window // 2, "max_tokens": window}
        if queries := settings["spans"].get("query_tokens"):  # as short as the shortest other anchor, at most
            settings["spans"]["query_tokens"] = [min(tokens, window // 2) for tokens in queries]
        if pairs is not None:
            temperature = file["objective"]["loss"]["temperature"]
            objective = {"kind": "simcse", "supervised": True, "hard_negatives": False, "head": False}
            objective |= {"temperature": temperature, "max_tokens": window}
            rows = min(BATCH_DOCUMENTS, pairs[1])
            task = {"data": str(pairs[0]), "objective": objective, "batch_documents": rows}
            settings |= {"auxiliary_tasks": {"pairs": task}, "task_schedule": "joint"}
        return TrainConfig.model_validate(settings)


def document_lines(documents: Iterable[str]) -> str:
    """Documents as JSON Lines."""
    return "".join(json.dumps({"text": text}) + "\n" for text in documents)


class State(Strict):
    """What an adaptation remembers of all starts of the command; every change is written at once."""

    model_config = ConfigDict(frozen=False)  # it changes during an adaptation, and is written at each change

    config: AdaptConfig
    start: str | None = None  # Fingerprint of the start
    seconds: float = 0.0  # time used by all starts until the last change
    steps: int | None = None  # steps of the training, once they are decided
    looks: list[str] = Field(default_factory=list)  # looks at the test
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
        """Compares the fingerprint of the start with that of earlier starts of the command."""
        if self.start not in (None, start):
            raise UsageError(f"--output {self._path.parent}: the encoder has changed since; name another folder")

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


def stored(config: AdaptConfig, output: Path) -> State:
    """The state of the folder, new or of an earlier start of the same adaptation."""
    path = output / STATE
    try:
        state = State.model_validate_json(path.read_bytes()) if path.is_file() else State(config=config)
    except ValidationError as error:
        raise UsageError(
            f"{path} is damaged: delete it and the folders candidates, folds and encoder, and the same command begins "
            "again"
        ) from error
    names = ("minutes", "stsb", "private", "skip_bad")  # a later start may have others
    free = {name: getattr(config, name) for name in names}
    before, after = state.config.model_copy(update=free).model_dump(), config.model_dump()
    if differing := [name for name in after if before[name] != after[name]]:
        raise UsageError(
            f"--output {output}: holds an adaptation with another {', '.join(differing)}; name another folder"
        )
    if not state.steps and config.minutes > state.config.minutes:
        state.seconds = 0.0  # no training fitted into the minutes before; those of this call are its own
    state.config, state._path = config, path
    return state


@contextmanager
def opened(config: AdaptConfig, output: Path) -> Iterator[State]:
    """The state of the folder (`stored`), which is written at the end."""
    state = stored(config, output)
    try:
        yield state
    finally:
        if (output / STATE).is_file():  # not before the corpus is prepared: until then another one may be named
            state.write()  # also after a failure: --minutes counts the time of all starts
