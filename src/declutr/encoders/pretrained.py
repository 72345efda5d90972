"""Transformers from files: folders of transformers and sentence-transformers, and checkpoints of runs.

Files may come from somebody else, and a model that is loaded in part gives wrong scores: its weights are compared with
those that the encoder computes with.
"""

import json
import os
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import normalizers
from transformers import AutoConfig, AutoModel, AutoTokenizer, PretrainedConfig
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from declutr.common import seeding
from declutr.common.console.terminal import excerpt
from declutr.common.errors import DamagedError, EncoderError, UnreadableError, redact
from declutr.common.hub import cache_only, hub_problem
from declutr.common.paths import expand
from declutr.common.storage import read_json
from declutr.common.stores.address import child, is_remote
from declutr.common.yamlfile import read_yaml_file
from declutr.encoders.modules import Recipe, read_recipe
from declutr.encoders.protocol import Pooling, check_vocabulary
from declutr.pipeline.shards.manifest import TOKENIZER
from declutr.pipeline.tokenizer.tokenization import sentencepiece_problem
from declutr.trainer.build import build_encoder, build_objective
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, ENCODER
from declutr.trainer.checkpoints.state import EXPORT
from declutr.trainer.checkpoints.weights import load_objective, load_parameters
from declutr.trainer.config import TrainConfig
from declutr.trainer.model.behind import DAMAGE
from declutr.trainer.model.bounds import (
    check_code,
    check_config,
    check_folder,
    check_size,
    check_steps,
    check_tokenizer,
)
from declutr.trainer.model.config import EncoderConfig
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.language_model import load_shapes
from declutr.trainer.model.layouts import embedding_layout

_POOLER = "pooler"
_TRUST = "add --trust-remote-code"
_WEIGHTS = (".safetensors", ".bin")
Loaded = tuple[Encoder, Any, Recipe | None, tuple[str, ...]]
"""Encoder, tokenizer, recipe of the steps after pooling, and unused parts of its files."""


def load_pretrained(name: str, pooling: Pooling | None, trust_remote_code: bool, seed: int | None) -> Loaded:
    """Load a transformers model, padded if it cannot pack; with a seed, use random weights."""
    local = Path(name).is_dir()
    try:
        if local:
            check_folder(Path(name))
            if (Path(name) / "adapter_config.json").exists():  # transformers would fetch its base from the hub
                raise DamagedError("it is an adapter of another model; merge it into that model and save both")
    except (DamagedError, OSError) as error:
        raise EncoderError(f"{name} is not loaded: {error}") from error
    recipe = read_recipe(name, pooling)
    if recipe and recipe.size and seed is not None:
        raise EncoderError(f"untrained:{name}: has dense layers after its pooling, which would stay trained")
    where: dict[str, Any] = {"subfolder": recipe.subfolder} if recipe and recipe.subfolder else {}
    trust = {"trust_remote_code": trust_remote_code}
    if not local and hub_problem():
        where["local_files_only"] = True  # files of an earlier download
    unused: tuple[str, ...] = ()
    folder = Path(name, recipe.subfolder if recipe else "")
    try:
        check_config(settings := PretrainedConfig.get_config_dict(name, **where)[0])
        if local:
            check_tokenizer(folder)
        if not trust_remote_code:
            check_code("config.json", settings, _TRUST)
            check_code("tokenizer_config.json", get_tokenizer_config(name, **where), _TRUST)
        config = AutoConfig.from_pretrained(name, **where, **trust)
        tokenizer = AutoTokenizer.from_pretrained(name, **where, **trust)
        if config.is_encoder_decoder:  # AutoModel would build the decoder, which sentence-transformers leaves out
            raise EncoderError(f"{name}: model type {config.model_type} has a decoder; take an encoder alone")
        if local and not any((folder / file).is_file() for file in _files_of(tokenizer)):
            raise EncoderError(
                f"{name}: holds no file of a tokenizer ({', '.join(_files_of(tokenizer))}), and to an empty one all "
                "texts are equal; copy them from the encoder that it was made from"
            )
        check_steps(json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {})
        _ = tokenizer.is_fast and tokenizer.backend_tokenizer.encode("ꙮ")  # raises without a token for unknown ones
        if seed is None:
            if local:
                with torch.device("meta"):  # no memory for sizes that the weights do not have
                    planned = AutoModel.from_config(config, **_without_pooler(config), **trust)
                in_files = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in _WEIGHTS)
                check_size(sum(parameter.numel() for parameter in planned.parameters()), in_files)
            kinds = _without_pooler(config) | where | trust
            # Sizes that differ are reported with the other weights, by name.
            kinds |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
            # dtype, because transformers 5 would take that of the files
            model, report = AutoModel.from_pretrained(name, dtype=torch.float32, **kinds)
            unused = check_weights(name, model, report)
        else:
            with torch.random.fork_rng(devices=[]):  # the caller's generator stays as it was
                torch.manual_seed(seeding.torch_seed(seed, "weights"))
                model = AutoModel.from_config(config, dtype=torch.float32, **_without_pooler(config), **trust)
    except EncoderError:
        raise
    except DamagedError as error:
        raise EncoderError(f"{name} is not loaded: {error}") from error
    except Exception as error:  # transformers and tokenizers raise any kind for files that they did not write
        broken = (broken_file(folder, seed is None) or sentencepiece_problem(folder)) if local else ""
        raise EncoderError(f"{name} cannot be loaded as an encoder: {broken or explain(error)}") from error
    special = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    check_vocabulary(name, tokenizer.get_vocab(), model.get_input_embeddings().num_embeddings, special)
    if recipe and recipe.lower_case:
        _lower_case(tokenizer)
    chosen = pooling or (recipe.pooling if recipe else "mean")
    encoder = Encoder(EncoderConfig(pretrained=name, pooling=chosen), model, seed=0).eval()
    dense = [layer for layer in recipe.after.modules() if isinstance(layer, torch.nn.Linear)] if recipe else []
    if dense and dense[0].in_features != encoder.hidden_size:
        raise EncoderError(
            f"{name}: its first dense layer takes {dense[0].in_features} numbers, and its embeddings have "
            f"{encoder.hidden_size} before it; its files belong to different encoders"
        )
    try:
        layout = embedding_layout(encoder)
    except EncoderError as error:
        raise EncoderError(
            f"{name}: {error}. Batches of it would give wrong embeddings; take another encoder"
        ) from error
    encoder.set_layout(encoder.config.model_copy(update={"layout": layout}))
    return encoder, tokenizer, recipe, unused


def _files_of(tokenizer: Any) -> list[str]:
    """Names of the files, of which one holds the vocabulary of a tokenizer of this class."""
    return sorted({*tokenizer.vocab_files_names.values(), "tokenizer.json", "tokenizer.model"})


def _lower_case(tokenizer: Any) -> None:
    """Make the tokenizer lower-case texts before anything else; one that does so by itself stays as it is."""
    engine = tokenizer.backend_tokenizer
    own = json.loads(engine.to_str())["normalizer"] or {}
    first_own = own["normalizers"][0] if own.get("type") == "Sequence" and own["normalizers"] else own
    if first_own.get("type") == "Lowercase" or first_own.get("lowercase"):  # the latter is BERT's
        return
    first = normalizers.Lowercase()
    engine.normalizer = normalizers.Sequence([first, engine.normalizer]) if engine.normalizer else first


def _without_pooler(config: Any) -> dict[str, Any]:
    """Options without BERT's and RoBERTa's extra dense layer, which is never used here and often not in the file."""
    return {"add_pooling_layer": False} if config.model_type in ("bert", "roberta", "xlm-roberta", "camembert") else {}


def load_run(path: Path, pooling: Pooling | None, trust_remote_code: bool) -> Loaded:
    """Load the encoder of a checkpoint, or of a run's newest complete checkpoint.

    The run may come from somebody else: its `config.yaml` names an encoder and shards, and grants nothing. No address
    in it is opened, because a request carries this user's credentials.
    """
    if (path / CHECKPOINTS).is_dir():
        try:
            latest = checkpoint.find_latest(path / CHECKPOINTS)
        except UnreadableError as error:
            raise EncoderError(str(error)) from error
        if latest is None:
            raise EncoderError(f"{path}: the run has no complete checkpoint yet")
        path = latest[0]
    settings = path.parent.parent / "config.yaml"
    try:
        config = TrainConfig.model_validate(read_yaml_file(settings))
        tokenizer = _tokenizer_of(path, config.places[0])
        # both serve training alone; trust is the user's to give, not the run's
        plain = {"compile": False, "activation_checkpointing": False, "trust_remote_code": trust_remote_code}
        update = plain | ({"pooling": pooling} if pooling else {})
        config = config.model_copy(update={"encoder": config.encoder.model_copy(update=update)})
        encoder = _cached_encoder(config, tokenizer, path / ENCODER)
        checkpoint.read_state(path)  # compares the bytes of the weights before they are loaded
        load_parameters(path, encoder)
        objective, recipe = build_objective(config.main, encoder, "drop"), None
        if layers := objective.exported():  # those that an export contains too, such as supervised SimCSE's head
            load_objective(path, objective)
            recipe = Recipe("", config.encoder.pooling, torch.nn.Sequential(*layers), layers[-1].linear.out_features)
    except EncoderError:
        raise
    except Exception as error:  # the libraries raise any kind for files that they did not write
        raise EncoderError(
            f"{path} cannot be loaded; it needs its files, and its run's config.yaml and shards: {explain(error)}"
        ) from error
    return encoder.eval(), tokenizer, recipe, ()


def _cached_encoder(config: TrainConfig, tokenizer: Any, weights: Path) -> Encoder:
    """Build the encoder without asking the hub for the name in `encoder.pretrained`."""
    name = config.encoder.pretrained
    try:
        with cache_only("the run that names it may come from someone else"):
            planned = load_shapes(config.encoder, tokenizer)
            check_size(sum(parameter.numel() for parameter in planned.parameters()), weights.stat().st_size)
            return build_encoder(config, tokenizer)
    except OSError as error:
        if name is None or expand(name).exists():
            raise
        raise EncoderError(
            f"encoder.pretrained = {name} of the run is not in the hub's cache on this machine, and it is not fetched, "
            f"because the run may come from someone else; if you trust that name: hf download {name}"
        ) from error


def _tokenizer_of(path: Path, data: str) -> Any:
    """Load the tokenizer of a checkpoint: the run's copy, else that of its shards in a folder."""
    run = path.parent.parent
    folder = run / TOKENIZER
    if not folder.is_dir() and is_remote(data):
        raise EncoderError(
            f"{path} needs the tokenizer of its run's shards, which are at data = {redact(data)}. No address that a "
            f"run names is opened, because the run may come from someone else; if you trust this one: "
            f"declutr copy {redact(child(data, TOKENIZER))} {folder}"
        )
    if not folder.is_dir() and not (folder := expand(data) / TOKENIZER).is_dir():
        raise EncoderError(
            f"{path} needs the tokenizer of its run's shards; data = {data!r} of {run / 'config.yaml'} is not a folder "
            f"with a tokenizer on this machine ({folder.absolute()}); copy the shards there, or score the run's "
            f"{EXPORT} folder, which contains its tokenizer"
        )
    check_folder(folder)
    check_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # None would ask at a terminal


def check_weights(name: str, model: torch.nn.Module, report: Mapping[str, Collection[Any]]) -> tuple[str, ...]:
    """Compare the weights in the file with those the encoder computes with; return the unused parts of the file.

    Heads (of masked language models, classifiers, next sentences) and a pooler over the first token do not affect an
    embedding. The file may contain them, and a pooler may be missing: it is set to 0, so that its random start does not
    change the encoder's fingerprint.

    `report` is the `output_loading_info` of `from_pretrained`. The unused parts are returned with their numbers of
    weights.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    own = {child for child, _ in model.named_children()} - {_POOLER}
    missing = [key for key in report["missing_keys"] if not _of_pooler(key)]
    mismatched = [f"{key} {tuple(shape)} instead of {tuple(due)}" for key, shape, due in report["mismatched_keys"]]
    unexpected = [key.removeprefix(prefix) for key in report["unexpected_keys"]]
    foreign = [key for key in unexpected if key.partition(".")[0] in own]
    problems = [
        f"{what} {len(keys)} weight{'s' if len(keys) > 1 else ''}: {excerpt(sorted(keys))}"
        for keys, what in (
            (missing, "its files lack"),
            (mismatched, "its config.json has another shape for"),
            (foreign, "its config.json has no layer for"),
        )
        if keys
    ]
    if problems:
        more = f"; the files also hold {excerpt(sorted(unexpected))}" if missing and unexpected and not foreign else ""
        raise EncoderError(
            f"{name}: is not a complete encoder, so it gets no score: {'; '.join(problems)}{more}. Download it again, "
            "or export it with the library that made it"
        )
    if any(_of_pooler(key) for key in report["missing_keys"]):
        for key, parameter in model.named_parameters():
            if _of_pooler(key):
                torch.nn.init.zeros_(parameter)
    heads = Counter(key.partition(".")[0] for key in sorted(unexpected))
    return tuple(f"{head} ({number} weights)" for head, number in heads.items())


def broken_file(folder: Path, needs_weights: bool) -> str:
    """First missing or unreadable JSON or weights file of a folder, with reason and remedy; "" if all are readable."""
    again = "copy or download it again"
    if not (folder / "config.json").is_file():
        return f"{folder / 'config.json'} is missing; {again}"
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".json", *_WEIGHTS)):
        try:
            if path.is_file() and path.stat().st_size < 1024 and b"git-lfs" in path.read_bytes():
                return f"{path} is a pointer of git-lfs, not the file; run `git lfs pull` in {folder}"
            if path.suffix == ".json":
                read_json(path)
            elif path.suffix == ".bin":
                with path.open("rb") as stream:
                    start = stream.read(2)
                # torch.save writes a zip; earlier files are pickles, which nothing here opens
                if start in (b"", b"PK") and not zipfile.is_zipfile(path):
                    return f"{path} is damaged or half downloaded (its end is missing); {again}"
            else:
                with safe_open(path, "pt"):
                    pass
        except (OSError, ValueError, SafetensorError) as error:
            if path.exists() and not os.access(path, os.R_OK):
                return f"{path} cannot be read (permission denied)"
            reason = "it is shorter than its header says" if "not fully covered" in str(error) else error
            return f"{path} is damaged or half downloaded ({reason}); {again}"
    if needs_weights and not any(path.suffix in _WEIGHTS for path in folder.iterdir()):
        return f"{folder} holds no weights, such as model.safetensors; {again}"
    if not any(path for kind in ("tokenizer.json", "vocab*", "*.model") for path in folder.glob(kind)):
        return "no file there holds the vocabulary of a tokenizer; copy it from the encoder that it was made from"
    return ""


def explain(error: Exception) -> str:
    """Message of an error; if the model's code must be trusted, the option for that."""
    if "trust_remote_code" not in str(error):
        message = " ".join(str(error).split())
        return message if isinstance(error, DAMAGE) else f"{type(error).__name__}: {message}"
    return "it comes with Python code, which is not run; if you trust that code, add --trust-remote-code"


def _of_pooler(key: str) -> bool:
    return _POOLER in key.split(".")[:2]
