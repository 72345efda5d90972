"""Loading of encoders from runs and checkpoints, which may come from somebody else."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from declutr.common.credentials import redact
from declutr.common.errors import EncoderError, UnreadableError
from declutr.common.hub import cache_only
from declutr.common.paths import expand
from declutr.common.storage import read_json
from declutr.common.stores.address import child, is_remote
from declutr.common.yamlfile import read_yaml_file
from declutr.encoders.modules import Recipe
from declutr.encoders.pretrained import Loaded
from declutr.encoders.protocol import Pooling
from declutr.encoders.weights import explain
from declutr.pipeline.shards.manifest import TOKENIZER
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, ENCODER
from declutr.trainer.checkpoints.exported import A_PATH, EXPORT, SETTINGS
from declutr.trainer.checkpoints.weights import load_objective, load_parameters
from declutr.trainer.model.behind import modules_of
from declutr.trainer.model.bounds import check_folder, check_size, check_tokenizer
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.language_model import load_hf_config
from declutr.trainer.setup.build import build_encoder, new_objective
from declutr.trainer.setup.config import TrainConfig


def load_run(path: Path, pooling: Pooling | None, trust_remote_code: bool) -> Loaded:
    """Load the encoder of a checkpoint, or of a run's newest complete checkpoint.

    The run may come from somebody else: its `config.yaml` names an encoder and shards, and grants nothing. No address
    in it is opened, because a request carries this user's credentials.
    """
    if (path / CHECKPOINTS).is_dir():
        try:
            found = checkpoint.find_latest(path / CHECKPOINTS)
        except UnreadableError as error:
            raise EncoderError(str(error)) from error
        if found is None:
            raise EncoderError(f"{path}: the run has no complete checkpoint yet")
        path = found[0]
    settings = path.parent.parent / "config.yaml"
    try:
        config = TrainConfig.stored(read_yaml_file(settings))
        tokenizer = _tokenizer_of(path, config.places[0])
        plain = {"compile": False, "activation_checkpointing": False, "trust_remote_code": trust_remote_code}
        update = plain | ({"pooling": pooling} if pooling else {})
        config = config.model_copy(update={"encoder": config.encoder.model_copy(update=update)})
        encoder = _cached_encoder(config, tokenizer, path / ENCODER)
        checkpoint.read_state(path)
        load_parameters(path, encoder)
        recipe = _layers_behind(config, path, encoder)
    except EncoderError:
        raise
    except Exception as error:  # the libraries raise any kind for files that they did not write
        raise EncoderError(
            f"{path} cannot be loaded; it needs its run's config.yaml and shards: {explain(error)}"
        ) from error
    return encoder.eval(), tokenizer, recipe, ()


def _cached_encoder(config: TrainConfig, tokenizer: Any, weights: Path) -> Encoder:
    """Build the encoder without asking the hub for the name in `encoder.pretrained`.

    Raises:
        DamagedError: it has many more weights than the checkpoint's file.
        EncoderError: its files are neither in a folder nor in the hub's cache.
    """
    name = config.encoder.pretrained
    try:
        with cache_only("the run that names it may come from someone else"):
            hf = load_hf_config(config.encoder, len(tokenizer), {"pad_token_id": tokenizer.pad_token_id})
            with torch.device("meta"):
                planned = AutoModelForMaskedLM.from_config(hf, trust_remote_code=config.encoder.trust_remote_code)
            check_size(sum(one.numel() for one in planned.parameters()), weights.stat().st_size)
            return build_encoder(config, tokenizer)
    except OSError as error:
        if name is None or expand(name).exists():
            raise
        raise EncoderError(
            f"encoder.pretrained = {name} of the run is not in the hub's cache on this machine, and it is not fetched, "
            f"because the run may come from someone else; if you trust that name: hf download {name}"
        ) from error


def _layers_behind(config: TrainConfig, path: Path, encoder: Encoder) -> Recipe | None:
    """The layers of the objective that an export of this checkpoint contains, such as supervised SimCSE's head."""
    objective = new_objective(config, encoder, "drop")
    if not (layers := objective.exported()):
        return None
    load_objective(path, objective)
    return Recipe(
        subfolder="",
        pooling=config.encoder.pooling,
        after=modules_of(layers),
        size=layers[-1].linear.out_features,
        max_tokens=None,
        lower_case=False,
        prompt="",
    )


def start_of(path: Path) -> str:
    """Encoder from which an export, a run or its checkpoint was trained; "" if none or unknown."""
    of_run, of_export = (path / EXPORT / SETTINGS, path), (path / SETTINGS, path.parent)
    for file, run in (of_run, of_export, (path / checkpoint.STATE, path.parent.parent)):
        if not file.is_file():
            continue
        try:
            settings = run / "config.yaml"  # an export alone names no folder
            found = read_yaml_file(settings) if settings.is_file() else read_json(file)["config"]
            return str(found["encoder"]["pretrained"] or "").removeprefix(A_PATH)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""  # settings of another program; nothing depends on them here
    return ""


def _tokenizer_of(path: Path, data: str) -> Any:
    """Load the tokenizer of a checkpoint: the run's copy, else that of its shards in a folder.

    Raises:
        EncoderError: neither folder is on this machine.
        OSError, ValueError: the tokenizer cannot be read.
    """
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
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
