"""The masked language model of transformers that is trained: configuration, weights, frozen and compiled layers, ids.

transformers is imported inside functions: the import takes seconds, and a command that resumes a run needs no encoder.
"""

import os
import shutil
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from declutr.common import seeding
from declutr.common.console.terminal import excerpt
from declutr.common.errors import EncoderError, suggest
from declutr.common.hub import hub_or_cache
from declutr.common.paths import expand
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.model.bounds import check_code, check_config, check_folder
from declutr.trainer.model.config import EncoderConfig
from declutr.trainer.model.dropout import NEVER
from declutr.trainer.torch_private import raise_recompile_limit

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
ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")
# Heads and buffers in many published files that no masked language model has or needs.
_HARMLESS = (
    "pooler.",
    "seq_relationship.",
    "sop_classifier.",
    "position_ids",
    "lm_loss.",
    "discriminator_predictions.",
)
_NAMED = 6  # names in one message; further ones are counted
_COMPILERS = ("gcc", "clang")  # names under which Triton looks for a compiler of its launchers; `cc` is not among them
_GRAPHS = 32
"""Most graphs that torch makes before the rest runs without: kinds of layers, with and without gradients, share it."""
_LOGIT_UNIT = 64
INDUCTOR: dict[str, Any] = {"shape_padding": False}
"""Options of the compiler: no kernel is chosen by a timing, so that every process has the same ones."""


@contextmanager
def silence() -> Iterator[None]:
    """Mutes transformers' log below errors and its progress bars, and restores both afterwards."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class LoadReport:
    """Weights that were not loaded; none for an encoder from scratch."""

    # weights of the encoder that are missing in the files or have another shape; their values are random.
    encoder: tuple[str, ...] = ()
    head: tuple[str, ...] = ()  # weights of the MLM head for which the same holds
    # weights in the files that the model does not have, without those known to be harmless.
    unused: tuple[str, ...] = ()

    @staticmethod
    def of(
        model: Any,  # the model
        info: dict[str, Any],  # `missing_keys`, `mismatched_keys` and `unexpected_keys` of `from_pretrained`
    ) -> "LoadReport":
        """Reads transformers' report about a loaded masked language model."""
        missing = {name: name for name in info["missing_keys"] if not _harmless(name)}
        for name, stored, model_shape in info["mismatched_keys"]:
            missing[name] = f"{name} (of shape {list(stored)}, not {list(model_shape)})"
        body = f"{model.base_model_prefix}."
        return LoadReport(
            tuple(missing[name] for name in sorted(missing) if name.startswith(body)),
            tuple(missing[name] for name in sorted(missing) if not name.startswith(body)),
            tuple(sorted(name for name in info["unexpected_keys"] if not _harmless(name))),
        )

    def problems(
        self,
        pretrained: str | None,  # name or folder of the encoder
        needs_head: bool,  # True if the MLM head is trained and `encoder.new_mlm_head` is off
    ) -> list[str]:
        """Problems with random weights that should be trained ones, one line each."""
        name = f"encoder.pretrained = {pretrained}"
        problems = []
        if self.encoder:
            problems.append(
                f"{name}: its files lack weights of the encoder, which would be random: "
                f"{excerpt(self.encoder, _NAMED)}. The files are incomplete, or config.json belongs to another "
                "encoder; fetch it again"
            )
        if self.head and needs_head:
            problems.append(
                f"{name}: has no MLM head, and the MLM loss would use random weights: "
                f"{excerpt(self.head, _NAMED)}. Train without MLM, or start with a new "
                "head (encoder.new_mlm_head=true)"
            )
        return problems

    def remark(self, pretrained: str | None) -> str | None:
        """A message about unused weights, or None."""
        if not self.unused:
            return None
        return f"encoder.pretrained = {pretrained}: unused weights: {excerpt(self.unused, _NAMED)}"


def load_hf_config(
    config: EncoderConfig,  # settings of the encoder
    vocabulary_size: int,  # number of ids of the tokenizer; used only from scratch
    ids: dict[str, int | None],  # `pad_token_id`, `bos_token_id`, ... of the tokenizer; used only from scratch.
) -> Any:
    """Loads the transformers config of the encoder, without weights."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if config.pretrained is not None:
        with _source(config.pretrained) as source:
            if expand(source).is_dir():
                check_folder(expand(source))
            check_config(settings := PretrainedConfig.get_config_dict(source)[0])
            if not config.trust_remote_code:
                check_code("config.json", settings, "set encoder.trust_remote_code=true")
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
    for names, rate in ((_DROPOUTS, config.dropout), (ATTENTION_DROPOUTS, config.attention_dropout)):
        for name in names:
            if rate is not None and hasattr(hf, name):
                setattr(hf, name, rate)
    return hf


def special_ids(tokenizer: Any) -> dict[str, int | None]:
    """Ids of a tokenizer by their names in a configuration, for an encoder from scratch."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
    return {name: getattr(tokenizer, name) for name in names}


def load_shapes(config: EncoderConfig, tokenizer: Any) -> "PreTrainedModel":
    """The model of the encoder without weights, for its shapes; it takes no memory for them."""
    from transformers import AutoModelForMaskedLM

    hf = load_hf_config(config, len(tokenizer), special_ids(tokenizer))
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForMaskedLM.from_config(hf, trust_remote_code=config.trust_remote_code)
    return model


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
    """Loads the model in float32, missing weights drawn from the seed; lists weights it and its files don't share."""
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


def vocabulary_of(
    tokenizer: Any,  # of transformers
    prompt: str = "",  # text before every span
    query_prompt: str | None = None,  # text before queries; None: `prompt`
) -> Vocabulary:
    """Reads the ids that the collator needs from a transformers tokenizer."""
    if tokenizer.mask_token_id is None:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has no mask token, which MLM needs")
    bos = tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id
    eos = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    special = tuple(sorted(tokenizer.all_special_ids))
    prompts = prompt_ids(tokenizer, prompt), None if query_prompt is None else prompt_ids(tokenizer, query_prompt)
    return Vocabulary(len(tokenizer), bos, eos, tokenizer.mask_token_id, special, *prompts)


def prompt_ids(tokenizer: Any, prompt: str) -> tuple[int, ...]:
    """Ids of a prompt alone, without its last spaces: tokens of a text begin with theirs."""
    return tuple(tokenizer(prompt.rstrip(), add_special_tokens=False)["input_ids"]) if prompt.strip() else ()


def _harmless(name: str) -> bool:
    return any(part in name for part in _HARMLESS)


def frozen_parameters(model: "PreTrainedModel", num_trainable_layers: int | None) -> list[nn.Parameter]:
    """The parameters of the encoder before its last `num_trainable_layers` layers; none for None.

    Embeddings are among them, also where an MLM head shares them, and everything that all layers share, such as
    relative positions. A normalisation after the last layer is not.
    """
    if num_trainable_layers is None:
        return []
    layers = _layers(model)
    if num_trainable_layers > len(layers):
        raise EncoderError(
            f"num_trainable_layers = {num_trainable_layers}: the encoder has {len(layers)} layers; use at most "
            f"{len(layers)}, or null to train everything"
        )
    trained = {id(p) for layer in layers[-num_trainable_layers:] for p in layer.parameters()}
    parts = list(model.base_model.children())
    holder = next(number for number, part in enumerate(parts) if any(module is layers[-1] for module in part.modules()))
    trained |= {id(p) for part in parts[holder + 1 :] for p in part.parameters()}
    return [p for p in model.base_model.parameters() if id(p) not in trained]


def _layers(model: "PreTrainedModel") -> list[nn.Module]:
    """The layers of the encoder, from its input to its output."""
    count = int(model.config.num_hidden_layers)
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise EncoderError(
        f"num_trainable_layers: the {count} layers of model type {model.config.model_type} share their weights; set it "
        f"to null, or use an encoder of type {', '.join(FAMILIES[:5])}"
    )


def compile_layers(
    body: nn.Module,  # the encoder without its head; changed in place
    **options: Any,  # of torch.compile
) -> None:
    """Compiles an encoder's layers one by one, and what is before and after them, each for any lengths.

    Layers of one kind share a graph. The backward of a graph completes all gradients of its parameters at its end, so
    that those of a whole encoder could not be sent while it runs (trainer/parallel/reducers.py).
    """
    # which Dynamo causes itself, as it looks at the hidden states that a layer gets
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    raise_recompile_limit(_GRAPHS)
    for part in parts(body):
        part.compile(dynamic=True, **(options or {"options": INDUCTOR}))


def pad_vocabulary(layer: nn.Module | None, unit: int = _LOGIT_UNIT) -> None:
    """Lets the layer in front of the logits compute a multiple of `unit` of them, and drop those beyond the vocabulary.

    The rows of 50,265 logits in half precision have no aligned starts: a GPU computes them several times more slowly.
    Inductor would pad them itself, but by a timing, after which another process may compute other bits.
    """
    if isinstance(layer, nn.Linear) and layer.out_features % unit:
        layer.forward = partial(_padded_logits, layer, unit)  # type: ignore[method-assign]


def _padded_logits(layer: nn.Linear, unit: int, hidden: Tensor) -> Tensor:
    missing = -layer.out_features % unit
    bias = None if layer.bias is None else F.pad(layer.bias, (0, missing))
    return F.linear(hidden, F.pad(layer.weight, (0, 0, 0, missing)), bias)[..., : layer.out_features]


def parts(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of a module and the largest parts without layers.

    Modules without parameters and single ones of torch, such as a norm, are left out: they are one kernel already.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if layers and module not in layers:
        for child in module.children():
            yield from parts(child)
    elif next(module.parameters(), None) is not None and not type(module).__module__.startswith("torch.nn."):
        yield module


def compiler_problem() -> str | None:
    """The reason why torch.compile cannot generate kernels for a GPU, or None."""
    if find_spec("triton") is None:
        return "the package triton is missing; install torch for CUDA"
    compiler = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([compiler] if compiler else _COMPILERS)):
        return f"no C compiler was found ({compiler or ', '.join(_COMPILERS)}); install gcc, or set CC"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"{header} is missing; install python3-dev, or Python's headers in another way"
    return None


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
