"""The result of decoding one image or clip, and the reasons why it cannot be decoded."""

import re
from dataclasses import dataclass

from declutr.pipeline.shards.media import Media


class UndecodableError(ValueError):
    """A file is damaged, hostile or of an unknown kind; `reason` is counted as a failure."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class UnsuitableError(ValueError):
    """A sound file holds nothing to train on; `reason` is counted as a drop."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


_ADDRESS = re.compile(r"<_io\.BytesIO object at 0x[0-9a-f]+>")
_SHOWN_CHARACTERS = 200


def library_message(error: BaseException) -> str:
    """The message of a library in one line, the same in every process: without addresses in memory."""
    message = " ".join(_ADDRESS.sub("the file", str(error)).split()) or type(error).__name__
    return message[:_SHOWN_CHARACTERS]


@dataclass(frozen=True, slots=True)
class Decoded:
    """An image or clip as the shards hold it."""

    media: Media
    id: bytes
    """16 bytes: a hash of the stored pixels or frames, without the label."""
    notes: tuple[str, ...]
    """Changes that are counted, such as `first_frame`."""
