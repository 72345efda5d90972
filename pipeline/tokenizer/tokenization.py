"""Loading and training of tokenizers, their fingerprint and facts. batch_tokenizer.py applies them."""

import contextlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from declutr.common.config import Strict
from declutr.common.errors import ConfigError, UsageError
from declutr.common.hub import hub_or_cache, looks_like_a_path
from declutr.common.paths import expand
from declutr.common.storage import hash_json

SPECIAL_ROLES = ("bos", "eos", "cls", "sep", "pad", "mask", "unk")
# Letters without a space, digit or sign between them. The trainer's time grows with the square of the longest such
# run: 300,000 Chinese characters take minutes, in runs of 1,024 seconds.
_LONG_RUN = re.compile(r"[^\W\d_]{1024}")
EngineSetting = Literal["auto", "tiktoken", "wordpiece", "tokenizers"]


class _AnyTokenizer(Strict):
    """Settings of every kind of tokenizer."""

    engine: EngineSetting = "auto"
    """Library that makes the ids. auto: the fastest that gives equal ones."""


class PretrainedTokenizer(_AnyTokenizer):
    """An existing tokenizer."""

    kind: Literal["pretrained"]
    name: str
    """Name on the Hugging Face hub, or folder."""
    trust_remote_code: bool = False
    """Run the tokenizer's own code. Only for models you trust; no file can set it."""


class TrainedTokenizer(_AnyTokenizer):
    """A byte-level BPE trained on a sample of the corpus, with RoBERTa's special tokens."""

    kind: Literal["train"]
    vocab_size: int = Field(ge=261, le=10_000_000)
    """Number of tokens: 256 bytes, 5 special tokens, merges."""
    sample_mib: float = Field(default=16.0, gt=0)
    """Text to train on, MiB."""


TokenizerConfig = Annotated[PretrainedTokenizer | TrainedTokenizer, Field(discriminator="kind")]


class TokenizerInfo(Strict):
    """Facts about the tokenizer of the shards that the trainer needs. An id is None if there is no such token."""

    kind: Literal["pretrained", "train"]
    fingerprint: str
    vocab_size: int  # token ids are below this
    bos_token_id: int | None  # first token of every sequence: cls if it exists, else bos
    eos_token_id: int | None  # last token of every sequence: sep if it exists, else eos
    pad_token_id: int | None
    mask_token_id: int | None
    unk_token_id: int | None
    special_ids: list[int]


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """A fast Hugging Face tokenizer by name or folder."""
    from transformers import PreTrainedTokenizerFast

    unreached = None
    try:
        path = expand(name)
        if not path.is_dir() and looks_like_a_path(name):
            raise UsageError(f"no such folder; looked at {path.absolute()}")
        where = str(path) if path.is_dir() else name
        files = sorted(path.iterdir()) if path.is_dir() else []
        times = tuple(file.stat().st_mtime_ns for file in files)
        with contextlib.nullcontext() if path.is_dir() else hub_or_cache() as unreached:
            tokenizer = _loaded(where, trust_remote_code, times)
    except UsageError as error:
        raise ConfigError("tokenizer", [f"tokenizer.name = {name!r}: {error}"]) from error
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, OSError | ValueError):
            raise  # `tokenizers` raises plain Exception for a damaged tokenizer.json
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0].removesuffix(" from one of:")
        what = "holds no tokenizer that loads" if path.is_dir() else "is neither a folder nor reachable on the hub"
        problem = f"{what}: {first_line}"
        if missing := sentencepiece_problem(path):
            problem = missing
        elif unreached:
            problem = "is not a folder here, the hub's cache on this machine holds no copy, and the hub: " + unreached
        raise ConfigError("tokenizer", [f"tokenizer.name = {name!r} {problem}"]) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            "tokenizer", [f"tokenizer.name = {name!r} has no fast version, which is required; name another"]
        )
    if dropout := getattr(tokenizer.backend_tokenizer.model, "dropout", None):
        problem = (
            f"draws its ids at random (dropout = {dropout:.3g} of its BPE); set model.dropout to null in tokenizer.json"
        )
        raise ConfigError("tokenizer", [f"tokenizer.name = {name!r} {problem}"])
    return tokenizer


def was_replaced(name: str, trust_remote_code: bool, saved: Path) -> bool:
    """Returns True if a folder has another tokenizer than the one that was saved from it."""
    file = expand(name) / "tokenizer.json"
    if not file.is_file():
        return False
    try:
        if _facts(json.loads(file.read_bytes())) == _facts(json.loads((saved / file.name).read_bytes())):
            return False  # the usual case, without the seconds that transformers takes
    except (KeyError, TypeError, ValueError, RecursionError):  # damaged after it was saved
        return True
    return fingerprint(load_tokenizer(name, trust_remote_code)) != fingerprint(load_tokenizer(str(saved)))


def _facts(backend: dict[str, Any]) -> dict[str, Any]:
    """The parts of a tokenizer's JSON that decide the ids of a text."""
    return {key: backend[key] for key in ("normalizer", "pre_tokenizer", "added_tokens", "model")}


def sentencepiece_problem(folder: Path) -> str | None:
    """The problem of a folder whose tokenizer is a file of SentencePiece alone, which needs a library to be read."""
    alone = folder.is_dir() and not (folder / "tokenizer.json").is_file() and any(folder.glob("*.model"))
    if not alone or importlib.util.find_spec("sentencepiece"):
        return None
    return "has no tokenizer.json, only a SentencePiece file; install sentencepiece, or add a tokenizer.json"


@lru_cache(maxsize=1)
def _loaded(where: str, trust_remote_code: bool, stamps: tuple[int, ...]) -> Any:  # noqa: ARG001
    """Loads a tokenizer and caches one, because a run loads it several times; `stamps` are the times of its files."""
    # Imported here because it takes seconds, and the tasks that tokenize need only `tokenizers`.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)


def train_tokenizer(
    texts: Iterable[str],  # normalised texts; the same texts in the same order give the same tokenizer
    vocab_size: int,  # number of tokens; a small sample may give fewer
) -> Any:
    """Trains a byte-level BPE (PreTrainedTokenizerFast) with RoBERTa's <s>=0 <pad>=1 </s>=2 <unk>=3 <mask>=4."""
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
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # `alphabet` has no fixed order
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", mask],
    )
    backend.train_from_iterator((part for text in texts for part in _cut_runs(" " + text)), trainer)
    # Positional, because the name of the second argument differs between versions: sep, cls, trim, prefix space.
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), True, False)
    names = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, mask_token=mask, **{f"{role}_token": token for role, token in names.items()}
    )


def _cut_runs(text: str) -> Iterator[str]:
    """The text, cut within runs of more than 1,024 letters."""
    start = 0
    for run in _LONG_RUN.finditer(text):
        yield text[start : run.end()]
        start = run.end()
    if start < len(text):
        yield text[start:]


def special_ids(tokenizer: Any) -> dict[str, int | None]:
    """Ids of a Hugging Face tokenizer's special tokens by role; None where it has no such token."""
    return {role: getattr(tokenizer, f"{role}_token_id") for role in SPECIAL_ROLES}


def fingerprint(tokenizer: Any) -> str:
    """SHA-256 of everything that decides the ids of a text: tokenizers with equal fingerprints give equal ids.

    Covers vocabulary, merges, normaliser, pre-tokenizer, added tokens and special ids, but not truncation and padding,
    which are state.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    model = backend["model"]
    if "merges" in model:
        model["merges"] = [" ".join(merge) for merge in model["merges"]]  # `to_str` gives pairs since tokenizers 0.20
    return hash_json(_facts(backend) | {"model": model, "special_ids": special_ids(tokenizer)})


def describe_tokenizer(tokenizer: Any, kind: Literal["pretrained", "train"]) -> TokenizerInfo:
    """Facts of a tokenizer for the manifest."""
    ids = special_ids(tokenizer)
    return TokenizerInfo(
        kind=kind,
        fingerprint=fingerprint(tokenizer),
        vocab_size=max(tokenizer.get_vocab().values()) + 1,  # ids can have gaps
        bos_token_id=ids["cls"] if ids["cls"] is not None else ids["bos"],
        eos_token_id=ids["sep"] if ids["sep"] is not None else ids["eos"],
        pad_token_id=ids["pad"],
        mask_token_id=ids["mask"],
        unk_token_id=ids["unk"],
        special_ids=sorted(tokenizer.all_special_ids),
    )
