"""Any sentence encoder by its name: ours, transformers', sentence-transformers', and plain baselines."""

import re
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import ValidationError
from tokenizers import normalizers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

from common import seeding
from common.hub import hub_problem
from common.paths import expand
from common.storage import read_json
from common.stores.address import child, is_remote
from common.stores.copies import pull_all
from common.yamlfile import read_yaml_file
from evaluation.encoders.modules import Pooling, Recipe, read_recipe
from evaluation.encoders.protocol import EncoderError as EncoderError
from evaluation.encoders.protocol import SentenceEncoder
from evaluation.encoders.transformer import LongTexts, TransformerEncoder
from evaluation.encoders.weights import DAMAGE, broken_file, check_weights
from evaluation.encoders.words import SUFFIXES, HashedWords, WordVectors
from pipeline.shards.manifest import TOKENIZER
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CHECKPOINTS
from trainer.driver.export import EXPORT, SETTINGS
from trainer.model.encoder import Encoder
from trainer.model.language_model import UnfitEncoderError, max_span_tokens
from trainer.model.layouts import embedding_layout
from trainer.model.settings import EncoderConfig
from trainer.setup.build import build_encoder
from trainer.setup.config import TrainConfig

_STORES = ("s3://", "gs://", "gcs://", "file://")
_BASELINE = re.compile(r"(hashed-words|untrained)(?:@(\d+))?:(.+)")


def load_encoder(
    name: str,
    pooling: Pooling | None = None,
    device: str | None = None,
    *,
    max_tokens: int | None = None,
    long_texts: LongTexts = "cut",
    vocabulary: Collection[str] | None = None,
    tokenized: bool = False,
    trust_remote_code: bool = False,
) -> SentenceEncoder:
    """Loads an encoder.

    Args:
        name: an exported folder, a run (its export, else its newest whole checkpoint) or a checkpoint; a folder or name
            of transformers or sentence-transformers; a file of word vectors (.vec, .txt, also .gz);
            `hashed-words:SIZE`; `untrained:NAME`, the encoder NAME with random weights. `hashed-words@SEED:SIZE` and
            `untrained@SEED:NAME` draw others.
        pooling: None: what the encoder says, else mean.
        device: None: a GPU when there is one.
        max_tokens: of one input; None, or more than it can: the encoder's own limit.
        long_texts: longer inputs are cut, or read in windows.
        vocabulary: of a file of word vectors only these words are held in memory; None: all.
        tokenized: texts for word vectors are words with spaces between them, as SentEval's data are (`WordVectors`).
        trust_remote_code: run code that a model brings along. Only for models you trust; no file can grant this.

    Raises:
        EncoderError: it cannot be loaded, a weight is missing or left over, or it says of itself what cannot be
            computed exactly here.
    """
    # It would list the MLM head, which an encoder has no use for, as unexpected.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    path = Path(name)
    if baseline := _BASELINE.fullmatch(name):
        kind, seed, rest = baseline[1], int(baseline[2] or 0), baseline[3]
        if kind == "hashed-words":
            if not rest.isdigit() or not int(rest):
                raise EncoderError(f"{name}: write hashed-words:SIZE, for example hashed-words:300")
            return HashedWords(int(rest), seed)
        loaded = _pretrained(rest, pooling, trust_remote_code, seed)
    elif path.is_file() or name.endswith(SUFFIXES):
        return WordVectors(path, vocabulary, tokenized)
    elif (path / EXPORT).is_dir():
        loaded = _pretrained(str(path / EXPORT), pooling, trust_remote_code, None)
    elif (path / "state.json").is_file() or (path / CHECKPOINTS).is_dir():
        loaded = _of_run(path, pooling, trust_remote_code)
    else:
        loaded = _pretrained(name, pooling, trust_remote_code, None)
    encoder, tokenizer, recipe, unused = loaded
    if not getattr(tokenizer, "is_fast", False):
        raise EncoderError(f"{name}: its tokenizer {type(tokenizer).__name__} is none of the tokenizers library")
    limit = min(_model_limit(encoder), tokenizer.model_max_length, (recipe and recipe.max_tokens) or 10**9)
    least = len(tokenizer("")["input_ids"]) + 1
    if max_tokens is not None and max_tokens < least:
        raise EncoderError(f"max_tokens = {max_tokens}: {name} needs {least} for one token with its specials")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return TransformerEncoder(
        name=name,
        encoder=encoder.to(device),
        tokenizer=tokenizer,
        max_tokens=min(limit, max_tokens or limit),
        long_texts=long_texts,
        after=recipe.after.to(device).eval() if recipe else nn.Sequential(),
        prompt=recipe.prompt if recipe else "",
        embedding_size=recipe.size if recipe else None,
        unused=unused,
        pretrained=_start(path),
    )


Loaded = tuple[Encoder, Any, Recipe | None, tuple[str, ...]]
"""Encoder, tokenizer, what follows pooling, and parts of its files that it leaves out."""


def _pretrained(name: str, pooling: Pooling | None, trust_remote_code: bool, seed: int | None) -> Loaded:
    """A model of transformers in our encoder, padded where it cannot pack; with a seed, of random weights."""
    recipe = read_recipe(name, pooling)
    if recipe and recipe.size and seed is not None:
        raise EncoderError(f"untrained:{name}: has dense layers behind its pooling, which would stay trained")
    where: dict[str, Any] = {"subfolder": recipe.subfolder} if recipe and recipe.subfolder else {}
    trust = {"trust_remote_code": trust_remote_code}
    local = Path(name).is_dir()
    if not local and hub_problem():
        where["local_files_only"] = True  # what is kept here of an earlier download
    unused: tuple[str, ...] = ()
    try:
        config = AutoConfig.from_pretrained(name, **where, **trust)
        tokenizer = AutoTokenizer.from_pretrained(name, **where, **trust)
        if seed is None:
            kinds = _without_pooler(config) | where | trust
            # Sizes that differ are reported with the other weights, by name.
            kinds |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
            model, report = AutoModel.from_pretrained(name, dtype=torch.float32, **kinds)
            unused = check_weights(name, model, report)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seeding.torch_seed(seed, "weights"))
                model = AutoModel.from_config(config, dtype=torch.float32, **_without_pooler(config), **trust)
    except EncoderError:
        raise
    except DAMAGE as error:
        broken = broken_file(Path(name, recipe.subfolder if recipe else "")) if local else ""
        raise EncoderError(f"{name} cannot be loaded as an encoder: {broken or _told(error)}") from error
    if recipe and recipe.lower_case:
        _lower_case(tokenizer)
    chosen = pooling or (recipe.pooling if recipe else "mean")
    encoder = Encoder(EncoderConfig(pretrained=name, pooling=chosen), model, seed=0).eval()
    try:
        layout = embedding_layout(encoder)
    except UnfitEncoderError as error:
        raise EncoderError(
            f"{name}: {error}. Batches of it would give wrong embeddings; take another encoder"
        ) from error
    encoder.set_layout(encoder.config.model_copy(update={"layout": layout}))
    return encoder, tokenizer, recipe, unused


def _start(path: Path) -> str:
    """The encoder that an export or a run was trained on from; "" where there was none or is not known."""
    for file in (path / EXPORT / SETTINGS, path / SETTINGS):
        if file.is_file():
            try:
                return str(read_json(file)["config"]["encoder"]["pretrained"] or "")
            except (OSError, ValueError, KeyError, TypeError):
                return ""  # settings of others, which decide nothing here
    return ""


def _told(error: Exception) -> str:
    """The message of an error; where code would have to be trusted, what that takes."""
    if "trust_remote_code" not in str(error):
        return str(error)
    return "it brings Python code along, which is not run; if you trust that code, add --trust-remote-code"


def _of_run(path: Path, pooling: Pooling | None, trust_remote_code: bool) -> Loaded:
    """The encoder of a checkpoint, or of a run's newest whole one.

    The run may come from someone else: its `config.yaml` names an encoder and shards, and grants nothing.
    """
    if (path / CHECKPOINTS).is_dir():
        found = checkpoint.find_latest(path / CHECKPOINTS)
        if found is None:
            raise EncoderError(f"{path}: the run holds no whole checkpoint yet")
        path = found[0]
    settings = path.parent.parent / "config.yaml"
    try:
        config = TrainConfig.model_validate(read_yaml_file(settings))
        if not is_remote(config.data) and not (folder := expand(config.data) / TOKENIZER).is_dir():
            raise EncoderError(
                f"{path} needs the tokenizer of its run's shards, and data = {config.data!r} of {settings} names no "
                f"folder with one here ({folder.absolute()}): bring the shards there, or score the run's "
                f"{EXPORT} folder, which has its tokenizer with it"
            )
        tokenizer = _tokenizer_of(config.data)
        plain = {"compile": False, "activation_checkpointing": False, "trust_remote_code": trust_remote_code}
        update = plain | ({"pooling": pooling} if pooling else {})
        config = config.model_copy(update={"encoder": config.encoder.model_copy(update=update)})
        encoder = build_encoder(config, tokenizer)
        checkpoint.read_state(path)
        checkpoint.load_encoder(path, encoder)
    except EncoderError:
        raise
    except (*DAMAGE, ValidationError) as error:
        raise EncoderError(
            f"{path} cannot be loaded; it needs its run's config.yaml and shards: {_told(error)}"
        ) from error
    return encoder.eval(), tokenizer, None, ()


def _tokenizer_of(data: str) -> Any:
    """The tokenizer of shards.

    Of shards at an address, only the tokenizer is fetched, and not into the `cache` that the run's settings name.

    Raises:
        OSError, ValueError: it cannot be read, or the address is of a kind that no run has.
    """
    if not is_remote(data):
        return AutoTokenizer.from_pretrained(expand(data) / TOKENIZER, trust_remote_code=False)
    if not data.startswith(_STORES):
        raise ValueError(f"data = {data}: not fetched; only addresses that begin with {', '.join(_STORES)} are")
    with TemporaryDirectory(prefix="declutr-") as folder:
        pull_all(child(data, TOKENIZER), Path(folder) / TOKENIZER)
        return AutoTokenizer.from_pretrained(Path(folder) / TOKENIZER, trust_remote_code=False)


def _model_limit(encoder: Encoder) -> int:
    """Most tokens of one input; without end for encoders that count positions relatively."""
    return max_span_tokens(encoder.model) if hasattr(encoder.model.config, "max_position_embeddings") else 10**9


def _lower_case(tokenizer: Any) -> None:
    """Texts are put in lower case before anything else; idempotent."""
    engine = tokenizer.backend_tokenizer
    first = normalizers.Lowercase()
    engine.normalizer = normalizers.Sequence([first, engine.normalizer]) if engine.normalizer else first


def _without_pooler(config: Any) -> dict[str, Any]:
    """BERT's and RoBERTa's extra dense layer over the first token is never used here, and often not in the file."""
    return {"add_pooling_layer": False} if config.model_type in ("bert", "roberta", "xlm-roberta", "camembert") else {}
