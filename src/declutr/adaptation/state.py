"""State of an adaptation in its folder: settings, time used, steps of training, looks at its test."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field, ValidationError

from declutr.adaptation.config import AdaptConfig
from declutr.common.config import Strict
from declutr.common.errors import UsageError
from declutr.common.storage import write_text

STATE = "state.json"


class _Record(Strict):
    """The file."""

    config: AdaptConfig
    start: str | None = None
    seconds: float = 0.0
    steps: int | None = None
    looks: list[str] = Field(default_factory=list)


@dataclass
class State:
    """The state of one adaptation; every change is written at once.

    Attributes:
        path: the file.
        minutes: of `--minutes`.
    """

    path: Path
    minutes: float
    _record: _Record
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Time used by all starts of the command."""
        return self._record.seconds + time.monotonic() - self._began

    @property
    def seconds_left(self) -> float:
        """Time left of `--minutes`."""
        return max(0.0, 60 * self.minutes - self.seconds)

    @property
    def steps(self) -> int | None:
        """Steps of the training, once they are decided."""
        return self._record.steps

    def decide_steps(self, steps: int) -> None:
        """Keeps the number of steps for later starts; 0 is decided again, because there may be more minutes then."""
        self._write(steps=steps or None)

    def begin(self, start: str) -> None:
        """Keeps the fingerprint of the start.

        Raises:
            UsageError: an earlier start of the same adaptation had another one.
        """
        if self._record.start not in (None, start):
            raise UsageError(
                f"--output {self.path.parent}: the encoder has changed since this adaptation began; name another folder"
            )
        self._write(start=start)

    def look(self, what: str) -> int:
        """Counts a look at the test documents, and returns the number of looks. The same look again counts once."""
        self._write(looks=list(dict.fromkeys([*self._record.looks, what])))
        return len(self._record.looks)

    def close(self) -> None:
        """Adds the time of this start."""
        self._write(seconds=self.seconds)

    def _write(self, **changes: object) -> None:
        self._record = self._record.model_copy(update=changes)
        write_text(self.path, self._record.model_dump_json(indent=1) + "\n")


@contextmanager
def opened(config: AdaptConfig, output: Path) -> Iterator[State]:
    """The state of the folder, new or of an earlier start of the same adaptation.

    Raises:
        UsageError: the folder is of another adaptation, or its file is damaged.
    """
    path = output / STATE
    try:
        record = _Record.model_validate_json(path.read_bytes()) if path.is_file() else _Record(config=config)
    except ValidationError as error:
        raise UsageError(
            f"{path} is damaged: delete it and the folders candidates and encoder, and the same command begins again"
        ) from error
    differing = [
        name
        for name in AdaptConfig.model_fields
        if name not in ("minutes", "stsb") and getattr(record.config, name) != getattr(config, name)
    ]
    if differing:
        raise UsageError(
            f"--output {output}: holds an adaptation with another {', '.join(differing)}; name another folder"
        )
    state = State(path, config.minutes, record)
    try:
        yield state
    finally:
        state.close()
