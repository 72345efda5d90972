"""The process that decodes, `python -m declutr.pipeline.media.child MEMORY_MIB CPU_SECONDS FILE`. It reads batches.

A batch is answered after all of it has been read, and FILE (a descriptor) has the place of the file that is being
decoded. Whatever a file does to its decoder, it ends this process at most.
"""

import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial

from pydantic import TypeAdapter

from declutr.pipeline.media.clips import decode_clip, load_libraries
from declutr.pipeline.media.decoded import (
    FAILED,
    OUT_OF_MEMORY,
    UNSUITABLE,
    Answer,
    Decoded,
    Limits,
    UndecodableError,
    UnsuitableError,
    limit_memory,
    limit_time,
    read_batch,
    write_answer,
    write_started,
)
from declutr.pipeline.media.images import decode_image, load_formats
from declutr.pipeline.shards.content import AudioContent, ImagesContent, MediaContent

_BUFFER_BYTES = 1 << 18
Decode = Callable[[bytes], Decoded]


def main(argv: list[str]) -> None:
    """Answers batches until the input ends."""
    limits, started = Limits(int(argv[0]), float(argv[1])), int(argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes the input
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")  # on damaged metadata, which is not used
    answers = os.fdopen(os.dup(1), "wb", _BUFFER_BYTES)
    os.dup2(2, 1)  # a library that prints does not answer
    decoders: dict[str, Decode] = {}
    while (batch := read_batch(sys.stdin.buffer)) is not None:
        content, files = batch
        if content not in decoders:  # memory and time of the libraries do not count
            decoders[content] = _decode(TypeAdapter(MediaContent).validate_json(content))
            limit_memory(limits)
        for place, data in enumerate(files):
            write_started(started, place)
            limit_time(limits)
            write_answer(answers, _answer(decoders[content], data))
        answers.flush()


def _decode(content: MediaContent) -> Decode:
    """The function that decodes files of this content, with its libraries loaded."""
    if isinstance(content, ImagesContent):
        load_formats()
        return partial(decode_image, content=content, label="")
    assert isinstance(content, AudioContent)
    load_libraries(content)
    return partial(decode_clip, content=content, label="")


def _answer(decode: Decode, data: bytes) -> Answer:
    try:
        return decode(data)
    except UndecodableError as error:
        return FAILED, error.reason, str(error)
    except UnsuitableError as error:
        return UNSUITABLE, error.reason, str(error)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main(sys.argv[1:])
