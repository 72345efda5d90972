"""Interface of every sentence encoder, its cuts to smaller sizes, and the settings by which one is chosen; no torch."""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from declutr.common.config import AnyPrecision, Precision, Strict
from declutr.common.errors import EncoderError, nearest, suggest
from declutr.common.hub import hub_problem, looks_like_a_path
from declutr.common.paths import expand
from declutr.common.storage import hash_json, read_json

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


class SentenceEncoder(Protocol):
    """Converter of texts to embeddings."""

    @property
    def name(self) -> str:
        """Name by which it was loaded."""

    @property
    def size(self) -> int:
        """Numbers in an embedding."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the embeddings but the precision of their computation."""

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return embeddings `(len(texts), size)` in the order of the texts; TypeError for one text alone."""


@dataclass(frozen=True)
class Window:
    """What an encoder reads of a text."""

    engine: "Tokenizer"  # its tokenizer, which cuts nothing
    tokens: int  # most tokens of a text, without special ones and those of a prompt


def encode_counted(encoder: SentenceEncoder, texts: Sequence[str]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Embeddings `(len(texts), size)`, and `(len(texts), 2)` tokens of each text and those of them that were read.

    Both are 0 for an encoder that reads texts of any length.
    """
    if counted := getattr(getattr(encoder, "whole", encoder), "encode_counted", None):
        embeddings, tokens = counted(texts)
        return embeddings[:, : encoder.size], tokens
    return encoder.encode(texts), np.zeros((len(texts), 2), np.int64)


def token_counts(rows: Sequence["Encoding"], engine: "Tokenizer") -> list[tuple[int, int]]:
    """Tokens of each text before and after its cut by a tokenizer, without special ones."""
    special = engine.num_special_tokens_to_add(is_pair=False)
    read = [max(0, len(row) - special) for row in rows]
    rests = [sum(len(rest) - special for rest in row.overflowing) for row in rows]
    return [(tokens + rest, tokens) for tokens, rest in zip(read, rests, strict=True)]


def windows_of(rows: Sequence["Encoding"]) -> tuple[list["Encoding"], NDArray[np.int64]]:
    """All windows of tokenized texts, and `(n,)` the number of the text of each, ascending."""
    groups = [[row, *row.overflowing] for row in rows]
    owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return [window for group in groups for window in group], owners


_SHOWN_CHARACTERS = 40
MOST_PROMPT = 16_384  # most characters that may be put before every text


def texts_of(texts: Sequence[str]) -> list[str]:
    """The texts of `encode` as a list."""
    if isinstance(texts, str):
        raise TypeError("encode takes a list of texts: write encode([text])")
    if isinstance(texts, Mapping) or hasattr(texts, "columns"):  # of which `list` would give the names
        raise TypeError('encode takes a list of texts: write encode(list(table["text"]))')
    listed = list(texts)
    for place, text in enumerate(listed):
        if not isinstance(text, str):
            raise TypeError(f"texts[{place}] = {text!r}: is no text; leave it out, or give an empty text")
    return listed


Role = Literal["query", "document"]
_PROMPT_NAMES: dict[Role, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""Names of the prompts of a role, as the documentation of sentence-transformers lists them; its `encode_document` knows
only the first, because it adds an empty one of that name."""


def prompt_of(role: Role, prompts: Mapping[str, str]) -> str:
    """The prompt of a role: the first of its names that is not empty; a default prompt does not replace it."""
    return next((prompts[name] for name in _PROMPT_NAMES[role] if prompts.get(name)), "")


def role_prompts(prompts: Mapping[str, str]) -> dict[str, str]:
    """The prompts that belong to a role and are not empty."""
    return {name: prompts[name] for names in _PROMPT_NAMES.values() for name in names if prompts.get(name)}


def in_role(encoder: SentenceEncoder, role: Role) -> SentenceEncoder:
    """The encoder with its prompt for queries or for documents before every text; itself if that changes nothing."""
    change = getattr(encoder, "in_role", None)  # hashed words and static tables have no prompt
    return change(role) if change else encoder


def check_prompts(name: str, prompts: Mapping[str, str]) -> None:
    """Checks the lengths of prompts."""
    for prompt in prompts.values():
        if len(prompt) > MOST_PROMPT:
            raise EncoderError(f"{name}: its prompt has {len(prompt):,} characters; it may have {MOST_PROMPT:,}")


def unit_rows(rows: NDArray[Any]) -> NDArray[Any]:
    """Rows `(n, size)` scaled to length 1, in their own precision; a null row stays null."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def vectors_fingerprint(encoder: SentenceEncoder) -> str:
    """SHA-256 of everything that decides the embeddings, the precision included; equal ones mean equal vectors."""
    if precision_of(encoder) == "fp32":
        return encoder.fingerprint
    return hash_json([encoder.fingerprint, "bf16"])


def precision_of(encoder: SentenceEncoder) -> Precision:
    """Precision of the encoder's matrix products."""
    return getattr(encoder, "precision", "fp32")  # hashed words and exports have none


_FORMS = {"hashed-words": "hashed-words:SIZE", "untrained": "untrained:NAME", "words": "words:NAME"}
_BASELINE = re.compile(rf"({'|'.join(_FORMS)})(?:@(\d+))?:(.+)")
_MOST_NUMBERS = 65_536


def baseline(name: str) -> tuple[str, int, str] | None:
    """Kind, seed, and size or name of `hashed-words@SEED:SIZE`, `untrained@SEED:NAME` or `words:NAME`; else None."""
    if (match := _BASELINE.fullmatch(name)) is None:
        return None
    kind, seed, rest = match[1], int(match[2] or 0), match[3]
    if kind == "words" and match[2]:
        raise EncoderError(f"{name}: draws nothing; write words:{rest}")
    size = int(rest) if re.fullmatch(r"\d{1,5}", rest) else 0
    if kind == "hashed-words" and not 1 <= size <= _MOST_NUMBERS:
        raise EncoderError(
            f"{name}: write hashed-words:SIZE, from 1 to {_MOST_NUMBERS:,}, for example hashed-words:300"
        )
    return kind, seed, rest


def missing(name: str) -> str | None:
    """The problem of a name that can only be a path where nothing is; None for all other names."""
    if (not looks_like_a_path(name) and name not in _FORMS) or expand(name).exists():
        return None
    return f"{name} cannot be loaded: there is no such folder{near(name)}"


def near(name: str) -> str:
    """A suggestion of the nearest folder in the one above a path, or of a baseline, if there is one."""
    above = expand(name).parent
    paths = [str(Path(name).parent / path.name) for path in above.iterdir() if path.is_dir()] if above.is_dir() else []
    kind = nearest(re.split("[:@]", name)[0], _FORMS)
    return suggest(name, paths) or (f"; write {_FORMS[kind]}" if kind else "")


# of transformers, sentence-transformers and `declutr export`
_ENCODER_FILES = "config.json", "modules.json", "declutr_onnx.json"


def is_adaptation(folder: Path) -> bool:
    """Whether it is the output of `declutr adapt`, which has a state.json as a checkpoint has."""
    return (folder / "state.json").is_file() and any((folder / name).is_dir() for name in ("candidates", "data"))


def is_run(folder: Path) -> bool:
    """Whether it is the folder of a run, or a checkpoint of one."""
    return (folder / "checkpoints").is_dir() or ((folder / "state.json").is_file() and not is_adaptation(folder))


def no_encoder(folder: Path) -> str | None:
    """The problem of a file, or of a folder without the files of an encoder; None if it has one of them."""
    if folder.is_file():
        return f"{folder} is a file; name a folder (for word vectors that of a StaticEmbedding), or a name at the hub"
    above = folder.absolute().parent
    if (folder / "config.json").is_file():
        with suppress(OSError, ValueError, LookupError, TypeError):  # no modules.json of an encoder is above it
            modules = {str(module["path"]): str(module["type"]) for module in read_json(above / "modules.json")}
            if not modules[folder.name].endswith(".Transformer"):  # which is an encoder alone
                return f"{folder} is one module of an encoder; name the folder above it: {above}"
    if not folder.exists() and folder.name == "encoder" and is_adaptation(above):
        folder = above
    if not folder.is_dir() or any((folder / name).is_file() for name in _ENCODER_FILES):
        return None
    if is_adaptation(folder):
        if (folder / "encoder").is_dir():
            return f"{folder} is an adaptation; name its encoder: {folder / 'encoder'}"
        return f"{folder} is an adaptation without a better encoder; name the encoder that it started from"
    kinds = {"manifest.json": "holds prepared shards, not an encoder", "index.json": "is an index, not an encoder"}
    kinds |= {"metrics.jsonl": "is a run without a checkpoint, not an encoder"}
    what = next((kind for file, kind in kinds.items() if (folder / file).is_file()), "is no encoder")
    return f"{folder} {what}: it has neither config.json nor modules.json; name a run, or the folder `export` of one"


def file_of(name: str, file: str) -> Path | None:
    """Path of a file in a folder or at the hub; None if the encoder has no such file."""
    # imported here because they take a second, and most commands name a folder
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

    if Path(name).exists():
        path = Path(name) / file
        return path if path.is_file() else None
    if problem := missing(name):
        raise EncoderError(problem)
    try:
        return Path(hf_hub_download(name, file, local_files_only=hub_problem() is not None))
    except LocalEntryNotFoundError as error:  # first, because it is an EntryNotFoundError too
        if try_to_load_from_cache(name, file) is _CACHED_NO_EXIST:  # an earlier lookup found that the hub has none
            return None
        raise EncoderError(
            f"{name} cannot be loaded: there is no such folder here, and the hub cannot be asked for {file}: "
            f"{hub_problem()}. Without a network, download the model to a folder and name that folder{near(name)}"
        ) from error
    except EntryNotFoundError:
        return None
    except (HFValidationError, OSError) as error:
        raise EncoderError(
            f"{name} cannot be loaded: no such folder, and not at the hub: {error}{near(name)}"
        ) from error


def unloadable(name: str) -> str | None:
    """The problem of an encoder's name that needs no torch to be seen; None if it may be loaded."""
    try:
        if kind_and_name := baseline(name):
            return unloadable(kind_and_name[2]) if kind_and_name[0] != "hashed-words" else None
    except EncoderError as error:
        return str(error)
    place = expand(name)
    if is_run(place) or (place / "export").is_dir():
        return None
    if (problem := missing(name) or no_encoder(place)) or place.exists():
        return problem
    try:
        file_of(name, "modules.json")  # here, because a name that is misspelt should not wait for torch
    except EncoderError as error:
        return str(error)
    return None


def check_vocabulary(name: str, vocabulary: Mapping[str, int], rows: int, special: Collection[str]) -> None:
    """Compares ids by token, those of special ones included, with the rows of the table that they are looked up in."""
    if not vocabulary.keys() - {*special}:
        raise EncoderError(
            f"{name}: the vocabulary of its tokenizer is empty, so all texts are equal to it; copy the files of the "
            "tokenizer from the encoder that it was made from"
        )
    token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
    if largest >= rows:
        raise EncoderError(
            f"{name}: its tokenizer gives {token[:_SHOWN_CHARACTERS]!r} the id {largest:,}, and its table of "
            f"embeddings has {rows:,} rows; its files belong to different encoders"
        )


Pooling = Literal["mean", "cls", "max", "mean_without_cls"]
LongTexts = Literal["cut", "windows"]


class EncoderChoice(Strict):
    """Encoder and its treatment of long texts."""

    model: str  # name as `load_encoder` takes it
    pooling: Pooling | None = None  # pooling that overrides the encoder's own
    # Maximum tokens of one input, including special tokens; the encoder's own limit if not set.
    max_tokens: int | None = Field(default=None, ge=1)
    long_texts: LongTexts = "cut"  # treatment of longer texts: cut them, or read them in windows and average by tokens
    # Precision of the matrix products. auto: bf16 on a GPU that has it (cosine to fp32 at least 0.999) and on a CPU
    # with AMX or AVX-512 BF16 (at least 0.9999), else fp32.
    precision: AnyPrecision = "auto"
    # Use of the texts, which decides the encoder's prompt before them: query, or document (texts to be searched).
    role: Role | None = None
    # Text before every query, instead of the encoder's own.
    query_prompt: str | None = Field(default=None, max_length=MOST_PROMPT)
    # Text before every text to be searched, instead of the encoder's own.
    document_prompt: str | None = Field(default=None, max_length=MOST_PROMPT)
    # Run Python code that comes with a model. Only for models you trust. In a note or an index this is a record:
    # reading it back grants nothing.
    trust_remote_code: bool = Field(default=False, strict=True)


@dataclass
class CutEncoder:
    """The first `size` numbers of an encoder's embeddings, as they are; a cosine needs no new normalisation."""

    whole: SentenceEncoder
    size: int

    def __post_init__(self) -> None:
        self.name = f"{self.whole.name} [{self.size}]"
        # of the vectors, because a cut has no precision of its own that `vectors_fingerprint` could add
        self.fingerprint = hash_json([vectors_fingerprint(self.whole), self.size])
        self.pretrained = getattr(self.whole, "pretrained", "")

    def in_role(self, role: Role) -> "CutEncoder":
        """The encoder with its prompt for queries or documents."""
        whole = in_role(self.whole, role)
        return self if whole is self.whole else CutEncoder(whole, self.size)

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings `(len(texts), size)`."""
        return self.whole.encode(texts)[:, : self.size]


def parse_sizes(text: str) -> tuple[int, ...]:
    """The sizes of an option, ascending: whole numbers from 1, separated by commas; none for `none`."""
    if text.strip() == "none":
        return ()
    words = [word.strip() for word in text.split(",")]
    # isascii, because other scripts have digits too
    if wrong := [word for word in words if not (word.isascii() and word.isdecimal() and int(word))]:
        raise EncoderError(f"--sizes {text}: {', '.join(map(repr, wrong))} must be whole numbers from 1, or `none`")
    sizes = sorted(map(int, words))
    if len(set(sizes)) < len(sizes):
        raise EncoderError(f"--sizes {text}: a size is listed twice; list each once")
    return tuple(sizes)


def sizes_of(encoder: SentenceEncoder, sizes: tuple[int, ...] | None) -> tuple[int, ...]:
    """The smaller sizes at which an encoder is scored, ascending.

    `sizes` are the user's; None: those that `matryoshka_dimensions` of its config.json declares, if any.
    """
    if sizes is not None:
        if large := [size for size in sizes if size >= encoder.size]:
            raise EncoderError(
                f"{encoder.name}: --sizes {', '.join(map(str, large))}: its embedding has {encoder.size} numbers, "
                "which are scored anyway; name smaller sizes"
            )
        return sizes
    model = getattr(getattr(encoder, "encoder", None), "model", None)
    declared: Any = getattr(getattr(model, "config", None), "matryoshka_dimensions", None)
    if declared is None:
        return ()
    # type(), because True is an int
    if not isinstance(declared, list) or not all(type(size) is int and 1 <= size <= encoder.size for size in declared):
        raise EncoderError(
            f"{encoder.name}: its config.json has matryoshka_dimensions = {str(declared)[:60]}; they must be whole "
            f"numbers from 1 to {encoder.size}; correct it, or give --sizes"
        )
    return tuple(sorted({size for size in declared if size < encoder.size}))


def with_cuts(encoder: SentenceEncoder, sizes: Sequence[int]) -> list[SentenceEncoder]:
    """The encoder cut to each size, and then the whole one."""
    return [*(CutEncoder(encoder, size) for size in sizes), encoder]
