"""Compares a pretrained encoder's tokenizer with that of the shards by their files alone, without transformers."""

from pathlib import Path

from declutr.common.paths import expand
from declutr.common.storage import read_json
from declutr.pipeline.shards.manifest import TOKENIZER, Manifest
from declutr.trainer.setup.config import TrainConfig

_FILE = "tokenizer.json"


def tokenizer_problem(config: TrainConfig, manifest: Manifest, data: Path) -> str | None:
    """The problem of an encoder whose tokenizer has another id for a token of the shards' tokenizer.

    A tokenizer that is not on this machine, or differs otherwise, is compared when it is loaded (`encoder_problems`).

    Args:
        config: of the run.
        manifest: of its shards.
        data: folder of its shards.
    """
    name = config.encoder.pretrained
    if name is None or manifest.tokenizer is None:
        return None
    shards, encoder = _ids(data / TOKENIZER / _FILE), _ids(_file_of(name))
    token = next((token for token in shards if encoder.get(token, shards[token]) != shards[token]), None)
    if token is None:
        return None
    return (
        f"encoder.pretrained = {name}: its tokenizer is not the one that made the shards (the id of {token!r} is "
        f"{encoder[token]} in it and {shards[token]} in the shards); prepare the corpus with that tokenizer, "
        f"tokenizer.name={name}"
    )


def _file_of(name: str) -> Path | None:
    """The tokenizer of a folder or of a name in the hub's cache; None if it is not on this machine."""
    if (folder := expand(name)).is_dir():
        return folder / _FILE
    from huggingface_hub import try_to_load_from_cache  # imported here because not every run needs it
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, _FILE)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _ids(path: Path | None) -> dict[str, int]:
    """Ids of a tokenizer's file by token; empty if it cannot be read."""
    try:
        vocabulary = {} if path is None else read_json(path)["model"]["vocab"]
        # Unigram has a list of tokens with their scores.
        return {row[0]: number for number, row in enumerate(vocabulary)} if isinstance(vocabulary, list) else vocabulary
    except (OSError, ValueError, KeyError, TypeError, IndexError):  # loading it tells why
        return {}
