"""Text to token ids: loading or training a tokenizer, its fingerprint, encoding with bounded memory."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from common.config import ConfigError, Strict, expand
from common.storage import hash_json

SPECIAL_ROLES = ("bos", "eos", "cls", "sep", "pad", "mask", "unk")
_PIECE_CHARACTERS = 1_000_000
_BATCH_CHARACTERS = 4_000_000


class PretrainedTokenizer(Strict):
    """A tokenizer that exists: a name on the Hugging Face hub or a folder."""

    kind: Literal["pretrained"]
    name: str
    trust_remote_code: bool = False


class TrainedTokenizer(Strict):
    """A byte-level BPE trained on a sample of the corpus, with RoBERTa's special tokens."""

    kind: Literal["train"]
    vocab_size: int = Field(ge=261)
    """Tokens in all: 256 bytes, 5 special tokens, the rest merges."""
    sample_mib: float = Field(default=16.0, gt=0)
    """Text to train on, MiB, taken evenly over the corpus."""


TokenizerConfig = Annotated[PretrainedTokenizer | TrainedTokenizer, Field(discriminator="kind")]


class TokenizerInfo(Strict):
    """What the trainer needs to know about the tokenizer of the shards. An id is None where there is no such token."""

    kind: Literal["pretrained", "train"]
    fingerprint: str
    vocab_size: int
    """Token ids are below this."""
    bos_token_id: int | None
    """Opens every sequence: the cls token where there is one."""
    eos_token_id: int | None
    """Closes every sequence: the sep token where there is one."""
    pad_token_id: int | None
    mask_token_id: int | None
    unk_token_id: int | None
    special_ids: list[int]


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """A fast Hugging Face tokenizer by name or folder.

    Raises:
        ConfigError: there is none of that name, or it has no fast version.
    """
    # Imported where it is used: it takes seconds, and the tasks that tokenize need only `tokenizers`.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = expand(name)
    where = str(path) if path.is_dir() else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        problem = f"tokenizer.name = {name!r} is neither a folder with a tokenizer nor reachable on the hub: {first}"
        raise ConfigError("tokenizer", [problem]) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError("tokenizer", [f"tokenizer.name = {name!r} has no fast version, which this needs"])
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Trains a byte-level BPE with the special tokens <s>=0 <pad>=1 </s>=2 <unk>=3 <mask>=4, as RoBERTa uses them.

    Args:
        texts: normalised texts; the same texts in the same order give the same tokenizer.
        vocab_size: tokens in all; a small sample may give fewer.

    Returns:
        A `transformers.PreTrainedTokenizerFast`.
    """
    from transformers import PreTrainedTokenizerFast

    # As in RoBERTa: the mask takes the space before it, so that a masked word and its space are one token.
    mask = AddedToken("<mask>", lstrip=True, special=True, normalized=False)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", mask],
    )
    backend.train_from_iterator((" " + text for text in texts), trainer)
    # Positional, because the name of the second argument differs between versions: sep, cls, trim, prefix space.
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), True, False)
    names = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, mask_token=mask, **{f"{role}_token": token for role, token in names.items()}
    )


def special_ids(tokenizer: Any) -> dict[str, int | None]:
    """Ids of a Hugging Face tokenizer's special tokens by role; None where it has no such token."""
    return {role: getattr(tokenizer, f"{role}_token_id") for role in SPECIAL_ROLES}


def fingerprint(tokenizer: Any) -> str:
    """SHA-256 of everything that decides which id a text gets: two tokenizers agree on it when they agree on ids.

    Covers vocabulary, merges, normaliser, pre-tokenizer, added tokens and special ids; truncation and padding, which
    are state rather than identity, are left out.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    model = backend["model"]
    if "merges" in model:  # written as "a b" by older versions of `tokenizers`
        model["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    identity = {key: backend[key] for key in ("normalizer", "pre_tokenizer", "added_tokens")}
    return hash_json(identity | {"model": model, "special_ids": special_ids(tokenizer)})


def describe_tokenizer(tokenizer: Any, kind: Literal["pretrained", "train"]) -> TokenizerInfo:
    """Facts of a tokenizer for the manifest."""
    ids = special_ids(tokenizer)
    return TokenizerInfo(
        kind=kind,
        fingerprint=fingerprint(tokenizer),
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        bos_token_id=ids["cls"] if ids["cls"] is not None else ids["bos"],
        eos_token_id=ids["sep"] if ids["sep"] is not None else ids["eos"],
        pad_token_id=ids["pad"],
        mask_token_id=ids["mask"],
        unk_token_id=ids["unk"],
        special_ids=sorted(tokenizer.all_special_ids),
    )


class Encoder:
    """Texts to ids without special tokens, a few megabytes at a time whatever the length of a text.

    A special token spelled out in a text ("</s>" in a web page) is encoded as the characters it is made of: stored
    tokens hold no special ids. Byte-level vocabularies tell a word at the start of a line from one after a space, so
    they get one leading space; a span taken from the middle of a document then looks like any other.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        parsed = json.loads(backend.to_str())
        byte_level = '"ByteLevel"' in json.dumps(parsed["pre_tokenizer"])
        self._prefix = " " if byte_level else ""
        # GPT-2's pattern never matches across a space, except that a match may begin with one: a text cut before a
        # space gives the same pieces. That holds only if nothing else looks across the cut.
        self._splittable = (
            (parsed["pre_tokenizer"] or {}).get("type") == "ByteLevel"
            and parsed["pre_tokenizer"]["use_regex"]
            and parsed["normalizer"] is None
            and not any(token["rstrip"] or " " in token["content"] for token in parsed["added_tokens"])
        )

    @classmethod
    def load(cls, folder: Path) -> "Encoder":
        """The encoder of a folder written by `save_pretrained`."""
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Ids of each normalised text, `(num_tokens,)` each; an empty text has none."""
        pieces: list[list[NDArray[np.uint32]]] = [[] for _ in texts]
        for batch in _batches(self._pieces(texts)):
            encodings = self._backend.encode_batch_fast([piece for _, piece in batch], add_special_tokens=False)
            for (index, _), encoding in zip(batch, encodings, strict=True):
                pieces[index].append(np.array(encoding.ids, dtype=np.uint32))
        return [np.concatenate(part) if part else np.empty(0, np.uint32) for part in pieces]

    def _pieces(self, texts: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Texts with their leading space, long ones cut before spaces."""
        for index, text in enumerate(texts):
            if not text:
                continue
            start, text = 0, self._prefix + text
            while self._splittable and len(text) - start > _PIECE_CHARACTERS:
                cut = text.find(" ", start + _PIECE_CHARACTERS)
                if cut < 0:
                    break
                yield index, text[start:cut]
                start = cut
            yield index, text[start:]


def _batches(pieces: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Pieces in groups of a bounded number of characters: an encoding takes many times the memory of its text."""
    batch: list[tuple[int, str]] = []
    held = 0
    for piece in pieces:
        batch.append(piece)
        held += len(piece[1])
        if held >= _BATCH_CHARACTERS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
