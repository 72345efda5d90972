"""Bounds of a model's files, which may come from somebody else; checked before anything is built from them.

A config of a few hundred bytes can ask for any amount of memory and time, and a file can be a pipe that never ends.
"""

import math
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from declutr.common.errors import DamagedError
from declutr.common.storage import read_json

MIB = 2**20
MAX_SETTINGS_MIB = 8  # largest JSON file of settings
MAX_TOKENIZER_MIB = 128  # largest file of a tokenizer
MAX_FILES = 1_000  # largest number of files of a model, in its folder and the folders in it
MAX_VALUES = 200_000  # largest number of values in `config.json`
MAX_NUMBER = 10_000_000  # largest whole number in `config.json`: sizes, positions, token ids
MAX_OF = {"layers": 1_000, "heads": 1_024, "labels": 100_000, "groups": 1_000}
"""Largest number under a key with this word."""
MAX_EXTRA_NUMBERS = 2**26  # most weights that a model may have in addition to one for each byte of its files
MAX_LONGER = 256
"""Largest factor by which a tokenizer's normalizer may lengthen a text, and most values of its post-processor."""
MAX_PATTERN_CHARACTERS = 2_000  # longest regular expression of a tokenizer
MAX_REPEATS = 4  # most repeats in one alternative of a regular expression
MAX_LONG_REPEATS = 2
"""Most of them that are without a bound, or of 10 or more: the time grows with this power of the length of a text."""
_TOKENIZER = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "spm.model", "spiece.model")
_COUNT = re.compile(r"(?:^|_)(?:(layers|heads|labels|groups)|n_(layer|head))$")
_SIZES = ("hidden_size", "d_model", "dim", "intermediate_size", "hidden_dim", "vocab_size", "max_position_embeddings",
    "num_attention_heads", "n_heads", "n_head")  # fmt: skip
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_CLASS = re.compile(r"\[\^?\]?[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*\]")
_GROUP = re.compile(r"\(\?[a-z<!=>:-]+")
_LONG = re.compile(r"[*+]|\{\d*,?\d{2,}\}|\{\d+,\}")
_REPEAT = re.compile(r"[*+?{]")


def check_folder(folder: Path) -> None:
    """Checks that the files of a model's folder, and of the folders in it, are files of sizes that are read at once."""
    number = 0
    for place in (folder, *(path for path in folder.iterdir() if path.is_dir())):
        for path in place.iterdir():
            number += 1
            if number > MAX_FILES:
                raise DamagedError(f"{folder} holds more than {MAX_FILES:,} files; a model has a few dozen")
            if not path.exists() or path.is_dir():
                continue
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise DamagedError(f"{path} is not a file but a pipe, a socket or a device")
            tokenizer = path.name in _TOKENIZER
            mib = MAX_TOKENIZER_MIB if tokenizer else MAX_SETTINGS_MIB
            if (tokenizer or path.suffix == ".json") and status.st_size > mib * MIB:
                raise DamagedError(f"{path} has {status.st_size / MIB:,.0f} MiB; it may have {mib}")


def check_config(values: Mapping[str, Any]) -> None:
    """Checks the numbers of a `config.json` before a model of these sizes is built."""
    for number, (key, value) in enumerate(_leaves(values)):
        if number >= MAX_VALUES:
            raise DamagedError(f"config.json holds more than {MAX_VALUES:,} values")
        if "attn_implementation" in key and isinstance(value, str) and "/" in value:
            raise DamagedError(f"config.json: {key} = {value!r} names code at the hub; remove the key")
        if isinstance(value, bool) or not isinstance(value, (int, float)):  # True is an int, too
            if (_COUNT.search(key) or key in _SIZES) and isinstance(value, str):
                raise DamagedError(f"config.json: {key} = {value[:40]!r} must be a number")
            continue
        if not math.isfinite(value):
            raise DamagedError(f"config.json: {key} = {value} must be finite")
        count = _COUNT.search(key)
        limit = MAX_OF[count[1] or f"{count[2]}s"] if count else MAX_NUMBER
        if isinstance(value, int) and value > limit and "theta" not in key:
            # Python refuses to print more than 4,300 digits
            display = value if value < 10**30 else "a number of many digits"
            raise DamagedError(f"config.json: {key} = {display} must be at most {limit:,}")
        if key in _SIZES and value < 1:
            raise DamagedError(f"config.json: {key} = {value} must be at least 1")


def check_code(
    file: str,  # config.json or tokenizer_config.json
    values: Mapping[str, Any],  # its content
    remedy: str,  # what to write to run the code
) -> None:
    """Refuses files that name Python code of their own, where the user has not said that it may run.

    transformers computes a class of the library instead, without a word, if it has one of that type.
    """
    if values.get("auto_map"):
        raise DamagedError(f"{file} names Python code of its own (auto_map), which is not run; to trust it, {remedy}")


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Values with the key above them."""
    if isinstance(value, Mapping):
        for name, inside in value.items():
            yield from _leaves(inside, str(name))
    elif isinstance(value, list):
        for inside in value:
            yield from _leaves(inside, key)
    else:
        yield key, value


def check_size(num_weights: int, num_bytes: int) -> None:
    """Compares the weights that a config asks for with the bytes of the files that hold them."""
    if num_weights > num_bytes + MAX_EXTRA_NUMBERS:
        raise DamagedError(
            f"config.json describes {num_weights:,} weights, and its files of weights have {num_bytes:,} bytes; they "
            "belong to different models"
        )


def check_tokenizer(folder: Path) -> None:
    """Checks `tokenizer.json` and `tokenizer_config.json` of a folder, if it has them."""
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    contents = [read_json(path) if path.is_file() else {} for path in files]
    engine, settings = (value if isinstance(value, dict) else {} for value in contents)
    model = engine.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    added = engine.get("added_tokens")
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    decoder = settings.get("added_tokens_decoder")
    ids += [int(key) for key in decoder if str(key).isdigit()] if isinstance(decoder, dict) else []
    tokens = len(ids) + (len(vocabulary) if isinstance(vocabulary, list) else 0)
    largest = max((number for number in ids if isinstance(number, int)), default=0)
    if engine and largest > 2 * tokens + 1_000:
        raise DamagedError(
            f"{files[0].parent}: a token has the id {largest:,}, and the tokenizer has {tokens:,} tokens"
        )
    check_steps(engine)


def check_steps(engine: Mapping[str, Any]) -> None:
    """Checks the steps of a tokenizer before and behind its model, from `tokenizer.json`."""
    factor = 1
    if sum(1 for _ in _leaves(engine.get("post_processor"))) > MAX_LONGER:
        raise DamagedError(f"tokenizer.json: its post_processor has more than {MAX_LONGER} values")
    for key, value in _leaves({name: engine.get(name) for name in ("normalizer", "pre_tokenizer")}):
        if key in ("content", "prepend", "replacement") and isinstance(value, str):
            factor *= max(1, len(value))
            if factor > MAX_LONGER:
                raise DamagedError(f"tokenizer.json: its {key} may make a text more than {MAX_LONGER} times as long")
        if key == "Regex" and isinstance(value, str) and (problem := _pattern_problem(value)):
            raise DamagedError(f"tokenizer.json: the regular expression {value[:80]!r} {problem}")


def _pattern_problem(pattern: str) -> str | None:
    """The reason why a pattern may take exponential time, or a high power of the length of a text."""
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        return f"is longer than {MAX_PATTERN_CHARACTERS:,} characters"
    if re.search(r"(?<!\\)(?:\\\\)*\\(?:[1-9]|[kg]<)", pattern):
        return "refers back to a group, which may take exponential time"
    # what is left are groups, repeats and single characters
    plain = _GROUP.sub("(", _CLASS.sub("c", _ESCAPED.sub("e", pattern)))
    if re.search(r"\)[*+{]", plain):
        return "repeats a group, which may take exponential time"
    for part in _alternatives(plain):
        if len(_LONG.findall(part)) > MAX_LONG_REPEATS or len(_REPEAT.findall(part)) > MAX_REPEATS:
            return f"has more than {MAX_LONG_REPEATS} long or {MAX_REPEATS} repeats in one alternative"
    return None


def _alternatives(plain: str) -> Iterator[str]:
    """The alternatives of a pattern outside of its groups."""
    depth, start = 0, 0
    for place, character in enumerate(plain):
        depth += (character == "(") - (character == ")")
        if character == "|" and depth <= 0:
            yield plain[start:place]
            start = place + 1
    yield plain[start:]
