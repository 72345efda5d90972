"""Loading of encoders in the formats of transformers and sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import normalizers
from transformers import AutoConfig, AutoModel, AutoTokenizer, PretrainedConfig

from declutr.common import seeding
from declutr.common.errors import DamagedError, EncoderError
from declutr.common.hub import hub_problem
from declutr.encoders.modules import Recipe, read_recipe
from declutr.encoders.protocol import Pooling
from declutr.encoders.weights import broken_file, bytes_of_weights, check_weights, explain
from declutr.pipeline.tokenizer.tokenization import sentencepiece_problem
from declutr.trainer.model.bounds import check_config, check_folder, check_size, check_steps, check_tokenizer
from declutr.trainer.model.config import EncoderConfig
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.layouts import embedding_layout

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
        check_config(PretrainedConfig.get_config_dict(name, **where)[0])
        if local:
            check_tokenizer(folder)
        config = AutoConfig.from_pretrained(name, **where, **trust)
        tokenizer = AutoTokenizer.from_pretrained(name, **where, **trust)
        check_steps(json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {})
        if seed is None:
            if local:
                with torch.device("meta"):
                    planned = AutoModel.from_config(config, **_without_pooler(config), **trust)
                check_size(sum(parameter.numel() for parameter in planned.parameters()), bytes_of_weights(folder))
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
    except DamagedError as error:
        raise EncoderError(f"{name} is not loaded: {error}") from error
    except Exception as error:  # transformers and tokenizers raise any kind for files that they did not write
        broken = (broken_file(folder) or sentencepiece_problem(folder)) if local else ""
        raise EncoderError(f"{name} cannot be loaded as an encoder: {broken or explain(error)}") from error
    if recipe and recipe.lower_case:
        _lower_case(tokenizer)
    chosen = pooling or (recipe.pooling if recipe else "mean")
    encoder = Encoder(EncoderConfig(pretrained=name, pooling=chosen), model, seed=0).eval()
    if recipe and recipe.input_size not in (None, encoder.hidden_size):
        raise EncoderError(
            f"{name}: its first dense layer takes {recipe.input_size} numbers, and its embeddings have "
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
