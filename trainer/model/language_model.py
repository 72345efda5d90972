"""The masked language model of transformers that is trained: its configuration, weights, head and token ids.

transformers is imported inside functions: the import takes seconds, and a command that resumes a run needs no encoder.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from declutr.common import seeding
from declutr.common.errors import EncoderError
from declutr.common.hub import hub_or_cache
from declutr.common.paths import expand
from declutr.common.suggestions import suggest
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.model.bounds import check_config, check_folder
from declutr.trainer.model.config import EncoderConfig
from declutr.trainer.model.dropout import NEVER
from declutr.trainer.model.load_report import LoadReport, silence

if TYPE_CHECKING:
    from transformers import PreTrainedModel


FAMILIES = (
    "roberta", "xlm-roberta", "camembert", "bert", "modernbert", "eurobert", "nomic_bert", "mpnet", "deberta-v2",
    "longformer", "distilbert", "electra", "albert",
)  # fmt: skip
"""Model types that the tests train."""

_DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "embedding_dropout", "mlp_dropout",
    "hidden_dropout", "activation_dropout", "dropout",
)  # fmt: skip
_ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")


def load_hf_config(config: EncoderConfig, vocabulary_size: int, ids: dict[str, int | None]) -> Any:
    """Loads the transformers config of the encoder, without weights.

    Args:
        config: settings of the encoder.
        vocabulary_size: number of ids of the tokenizer; used only from scratch.
        ids: `pad_token_id`, `bos_token_id`, ... of the tokenizer; used only from scratch.

    Raises:
        DamagedError: its files ask for more than a model may have.
        EncoderError: the model is a decoder or another type without a masked language model.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if config.pretrained is not None:
        with _source(config.pretrained) as source:
            if expand(source).is_dir():
                check_folder(expand(source))
            check_config(PretrainedConfig.get_config_dict(source)[0])
            hf = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    else:
        assert config.from_config is not None
        settings = dict(config.from_config)
        check_config(settings)
        if settings["model_type"] not in CONFIG_MAPPING:
            near = suggest(str(settings["model_type"]), list(MODEL_FOR_MASKED_LM_MAPPING_NAMES))
            raise EncoderError(f"transformers has no model type {settings['model_type']!r}{near}")
        hf = AutoConfig.for_model(settings.pop("model_type"), **{"vocab_size": vocabulary_size, **ids, **settings})
    own_code = "AutoModelForMaskedLM" in (getattr(hf, "auto_map", None) or {})
    has_mlm = hf.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES or own_code
    if not has_mlm or hf.is_encoder_decoder or getattr(hf, "is_decoder", False):
        raise EncoderError(
            f"model type {hf.model_type} is not an encoder with a masked language model; "
            f"use one of {', '.join(FAMILIES)}"
        )
    if config.dropout is not None:
        for name in _DROPOUTS:
            if hasattr(hf, name):
                setattr(hf, name, config.dropout)
    if config.attention_dropout is not None:
        for name in _ATTENTION_DROPOUTS:
            if hasattr(hf, name):
                setattr(hf, name, config.attention_dropout)
    return hf


@contextmanager
def _source(pretrained: str) -> Iterator[str]:
    """Folder of a pretrained model, or its name on the hub; reads the hub's cache if the hub is unreachable."""
    folder = expand(pretrained)
    if folder.is_dir():
        yield str(folder)
    else:
        with hub_or_cache():
            yield pretrained


def load_with_dropout_layers(config: EncoderConfig, hf: Any, seed: int) -> tuple["PreTrainedModel", LoadReport]:
    """As `load_model`, with all dropout layers; a family may leave out those whose rate is 0."""
    zero = [name for name in _DROPOUTS if getattr(hf, name, None) == 0]
    for name in zero:
        setattr(hf, name, NEVER)
    model, load_report = load_model(config, hf, seed)
    for name in zero:  # the exported config has the rates of the encoder
        setattr(hf, name, 0.0)
        setattr(model.config, name, 0.0)
    return model, load_report


def load_model(config: EncoderConfig, hf: Any, seed: int) -> tuple["PreTrainedModel", LoadReport]:
    """Loads the masked language model in float32, and lists weights that it and its files do not share.

    Weights missing in the files are drawn from the seed.

    Raises:
        OSError: a file is missing or cannot be read.
        SafetensorError: a file is damaged.
    """
    from transformers import AutoModelForMaskedLM

    with silence(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.torch_seed(seed, "weights"))
        if config.pretrained is None:
            return AutoModelForMaskedLM.from_config(hf, dtype=torch.float32), LoadReport()
        with _source(config.pretrained) as source:
            model, info = AutoModelForMaskedLM.from_pretrained(
                source,
                config=hf,
                dtype=torch.float32,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # listed in `LoadReport`
            )
    return model, LoadReport.of(model, info)


def drops_attention(hf: Any) -> bool:
    """True if the encoder's own configuration drops attention weights."""
    return any(getattr(hf, name, 0) > 0 for name in _ATTENTION_DROPOUTS)


def padding_index(model: "PreTrainedModel") -> int | None:
    """pad_token_id if positions start after it (RoBERTa's family); None if they start at 0."""
    embeddings = getattr(model.base_model, "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(model.config.pad_token_id)
    return None


def max_span_tokens(model: "PreTrainedModel") -> int:
    """Length of the longest span that the positions allow, including special tokens."""
    skipped = padding_index(model)
    return int(model.config.max_position_embeddings) - (0 if skipped is None else skipped + 1)


def mlm_head(model: "PreTrainedModel") -> Callable[[Tensor], Tensor]:
    """The part of the model that maps `(K, H)` hidden states to `(K, vocabulary)` logits.

    Raises:
        ValueError: the head of this encoder family is unknown.
    """
    for name in ("lm_head", "cls", "predictions"):  # RoBERTa, MPNet, Longformer; BERT, DeBERTa; ALBERT
        if hasattr(model, name):
            head: Callable[[Tensor], Tensor] = getattr(model, name)
            return head
    if hasattr(model, "head") and hasattr(model, "decoder"):  # ModernBERT
        return lambda hidden: model.decoder(model.head(hidden))
    if hasattr(model, "generator_predictions"):  # ELECTRA
        return lambda hidden: model.generator_lm_head(model.generator_predictions(hidden))
    if hasattr(model, "vocab_projector"):  # DistilBERT
        return lambda hidden: model.vocab_projector(
            model.vocab_layer_norm(model.activation(model.vocab_transform(hidden)))
        )
    raise ValueError(
        f"{type(model).__name__} has no known MLM head; train without MLM, or use one of {', '.join(FAMILIES)}"
    )


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Reads the ids that the collator needs from a transformers tokenizer.

    Raises:
        ValueError: the tokenizer has no mask token.
    """
    if tokenizer.mask_token_id is None:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has no mask token, which MLM needs")
    bos = tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id
    eos = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    return Vocabulary(len(tokenizer), bos, eos, tokenizer.mask_token_id, tuple(sorted(tokenizer.all_special_ids)))
