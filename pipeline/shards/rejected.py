"""Documents that were not kept, written for inspection: JSON lines with the text and the reason."""

import gzip
import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from common.storage import write_aside
from pipeline.shards.ledger import Entry

REJECTED = "rejected"
"""Folder of the rejected documents in the output folder."""


@dataclass
class RejectedWriter:
    """Writes the rejected documents of one unit to `rejected/<unit>.jsonl.gz`; does nothing if disabled."""

    folder: Path
    unit: str
    enabled: bool
    _stack: ExitStack = field(default_factory=ExitStack)
    _stream: Any = None

    def __enter__(self) -> "RejectedWriter":
        if self.enabled:
            aside = self._stack.enter_context(write_aside(self.folder / REJECTED / f"{self.unit}.jsonl.gz"))
            raw = self._stack.enter_context(aside.open("wb"))
            # No name and no time in the header, so that equal documents give equal bytes.
            self._stream = self._stack.enter_context(gzip.GzipFile("", "wb", 6, raw, mtime=0))
        return self

    def add(self, entry: Entry, text: str) -> None:
        """Adds a document with its ledger row."""
        if self._stream is not None:
            facts = {"id": entry.id.hex() if entry.id else None, "source": entry.source, "offset": entry.offset}
            facts |= {"reason": entry.fate, "detail": entry.detail, "text": text}
            self._stream.write(json.dumps(facts, ensure_ascii=False).encode() + b"\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
