"""Loading of any sentence encoder by name: this project's, transformers', sentence-transformers', and baselines."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from os import PathLike
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from declutr.common.config import AnyPrecision, load_config
from declutr.common.console.logs import get_logger
from declutr.common.console.terminal import shorten
from declutr.common.errors import DamagedError, EncoderError, suggest
from declutr.common.hub import cache_only
from declutr.common.paths import expand
from declutr.common.storage import read_json
from declutr.common.yamlfile import read_yaml_file
from declutr.encoders.exported import MODULE, OnnxEncoder, StaticEncoder, token_means
from declutr.encoders.exported import SETTINGS as ONNX_SETTINGS
from declutr.encoders.pretrained import load_pretrained, load_run
from declutr.encoders.protocol import (
    CutEncoder,
    EncoderChoice,
    LongTexts,
    Pooling,
    Role,
    SentenceEncoder,
    baseline,
    in_role,
    is_run,
    missing,
    no_encoder,
    unit_rows,
)
from declutr.encoders.transformer import TransformerEncoder
from declutr.encoders.words import HashedWords
from declutr.trainer.build import has_bf16
from declutr.trainer.checkpoints.checkpoint import STATE
from declutr.trainer.checkpoints.state import A_PATH, EXPORT, SETTINGS
from declutr.trainer.driver.export import prompt_settings
from declutr.trainer.model.behind import kind_of
from declutr.trainer.model.bounds import check_folder, check_tokenizer
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.language_model import max_span_tokens
from declutr.trainer.torch_private import can_pack_linear, pack_linear, packed_linear

_PROBES = ("a", "A sentence of a usual length, with 2 numbers: 17.", "several words about one thing " * 20)
_LEAST_COSINE = 0.9999
_PACKED_ROWS = 2048  # the layout is made for batches of about this many tokens
_CHUNK_TEXTS = 8192  # enough that sorting by length leaves few tokens of padding


def load_encoder(
    # an exported folder, a run (its export, else its newest complete checkpoint) or a checkpoint; a folder or name of
    # transformers or sentence-transformers; a folder of `declutr export`; `hashed-words:SIZE`; of an encoder NAME
    # `words:NAME`, the mean of its token vectors without its layers, and `untrained:NAME`, it with random weights.
    # `hashed-words@SEED:SIZE` and `untrained@SEED:NAME` draw with another seed.
    name: str | PathLike[str],
    pooling: Pooling | None = None,  # None: the encoder's own, else mean
    device: str | None = None,  # None: a GPU if there is one
    *,
    max_tokens: int | None = None,  # maximum tokens of one input; None, or more than the encoder's limit: that limit
    long_texts: LongTexts = "cut",  # cut longer inputs, or read them in windows
    # run Python code that comes with a model. Only for models you trust; no file can grant this.
    trust_remote_code: bool = False,
    # of the transformer's matrix products. auto: bf16 on a GPU or a CPU that has units for it, else fp32.
    precision: AnyPrecision = "auto",
    # put the encoder's prompt for queries or for documents before every text. None: only a default prompt. `in_role` of
    # the result changes it.
    role: Role | None = None,
    query_prompt: str | None = None,  # text before every query, instead of the encoder's own
    document_prompt: str | None = None,  # text before every text to be searched, instead of the encoder's own
) -> SentenceEncoder:
    """Load an encoder; its `encode(texts)` returns float32 embeddings `(len(texts), encoder.size)`."""
    options = {key: value for key, value in locals().items() if key in EncoderChoice.model_fields}
    name, has_gpu = str(name), torch.cuda.is_available()
    max_tokens = load_config({"model": name, **options}, "load", EncoderChoice).max_tokens  # of Python, may be "64"
    device = str(device or ("cuda" if has_gpu else "cpu"))
    try:
        if torch.device(device).type == "cuda" and not has_gpu:
            raise EncoderError(f"device = {device}: torch finds none on this machine; cpu always works")
    except RuntimeError as error:  # torch does not know the name
        raise EncoderError(f"device = {device}: must be cpu or cuda{suggest(device, ('cpu', 'cuda'))}") from error
    if name.startswith("~"):
        name = str(expand(name))
    own = {"query": query_prompt, "document": document_prompt}
    own_prompts = {key: text for key, text in own.items() if text is not None}
    # At a higher verbosity it would list the MLM head, which an encoder does not use, as unexpected.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    path = Path(name)
    unused_here = _shown(pooling, max_tokens, long_texts, own_prompts)
    if parts := baseline(name):
        kind, seed, rest = parts
        if kind != "untrained" and unused_here:
            raise EncoderError(f"{name}: {unused_here} has no effect on {kind.replace('-', ' ')}; remove it")
        if kind == "hashed-words":
            return HashedWords(int(rest), seed)
        rest = str(expand(rest)) if rest.startswith("~") else rest
        rest = str(Path(rest, EXPORT)) if Path(rest, EXPORT).is_dir() else rest
        loaded = load_pretrained(rest, pooling, trust_remote_code, seed if kind == "untrained" else None)
        if kind == "words":
            return token_means(name, *loaded[:2])
    elif (path / EXPORT).is_dir():
        loaded = load_pretrained(str(path / EXPORT), pooling, trust_remote_code, None)
    elif is_run(path):
        loaded = load_run(path, pooling, trust_remote_code)
    elif problem := no_encoder(path):
        raise EncoderError(problem)
    elif encoder_of_export := _load_exported(path, unused_here):
        return in_role(encoder_of_export, role) if role else encoder_of_export
    else:
        loaded = load_pretrained(name, pooling, trust_remote_code, None)
    encoder, tokenizer, recipe, unused = loaded
    if not getattr(tokenizer, "is_fast", False):
        raise EncoderError(f"{name}: its tokenizer {type(tokenizer).__name__} is not from the tokenizers library")
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, (int, float)) or not longest >= 1:
        raise EncoderError(f"{name}: its tokenizer_config.json has model_max_length = {longest!r}, not a length")
    # transformers writes 10**30 if there is no limit.
    limit = min(int(min(longest, 10**9)), (recipe and recipe.max_tokens) or 10**9)
    if hasattr(encoder.model.config, "max_position_embeddings"):  # else positions are relative and without a limit
        limit = min(limit, max_span_tokens(encoder.model))
    min_tokens = len(tokenizer("")["input_ids"]) + 1
    if limit < min_tokens:
        raise EncoderError(f"{name}: it takes {limit} tokens, and one token with its special tokens needs {min_tokens}")
    if max_tokens is not None and max_tokens < min_tokens:
        raise EncoderError(f"max_tokens = {max_tokens}: {name} needs {min_tokens} for one token with its special ones")
    if max_tokens is not None and max_tokens > limit:
        get_logger().warning("max_tokens = %d: %s reads at most %d, so this is used", max_tokens, name, limit)
    # of a checkpoint, which has no such file
    declared = prompt_settings(encoder.prompts, encoder.config.prompt, encoder.config.query_prompt)
    prompts = recipe.prompts if recipe else declared["prompts"]
    prompt = recipe.prompt if recipe else prompts.get(declared.get("default_prompt_name", ""), "")
    after = recipe.after.to(device).eval() if recipe else nn.Sequential()
    if chosen_here := precision == "auto":
        precision = "bf16" if has_bf16(torch.device(device)) else "fp32"
    half = in_bf16(encoder) if precision == "bf16" and device == "cpu" else None
    if device == "cpu":
        for module in (half or encoder, after):
            pack_linears(module)  # torch's own products, by MKL, take twice as long on an AMD EPYC
    whole = TransformerEncoder(
        name=name,
        encoder=encoder.to(device),
        half=half,
        tokenizer=tokenizer,
        max_tokens=min(limit, max_tokens or limit),
        long_texts=long_texts,
        after=after,
        prompt=prompt,
        prompts={**prompts, **own_prompts},
        pools_prompt=recipe is None or recipe.pools_prompt,
        embedding_size=recipe.size if recipe else None,
        unused=unused,
        precision=precision,
        chunk_texts=None if device == "cpu" else _CHUNK_TEXTS,  # on a CPU tokenizing ahead would compete with it
        pretrained=start_of(path),
    )
    if chosen_here and precision == "bf16":
        whole = _close_enough(whole)
    cut = CutEncoder(whole, recipe.cut) if recipe and recipe.cut and recipe.cut < whole.size else whole
    return in_role(cut, role) if role else cut


def _shown(pooling: Pooling | None, max_tokens: int | None, long_texts: LongTexts, own_prompts: dict[str, str]) -> str:
    """Options of texts and pooling as they were given; empty if all have their defaults."""
    options = {"--pooling": pooling, "--max-tokens": max_tokens, "--long-texts": long_texts}
    shown = [f"{name} {value}" for name, value in options.items() if value not in (None, "cut")]
    return ", ".join([*shown, *(f"--{role}-prompt {shorten(text, 40)!r}" for role, text in own_prompts.items())])


def start_of(path: Path) -> str:
    """Encoder from which an export, a run or its checkpoint was trained; "" if none or unknown."""
    of_run, of_export = (path / EXPORT / SETTINGS, path), (path / SETTINGS, path.parent)
    # the export of a run, an export, a checkpoint
    for file, run in (of_run, of_export, (path / STATE, path.parent.parent)):
        if not file.is_file():
            continue
        try:
            settings = run / "config.yaml"  # an export alone names no folder
            config = read_yaml_file(settings) if settings.is_file() else read_json(file)["config"]
            return str(config["encoder"]["pretrained"] or "").removeprefix(A_PATH)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""  # settings of another program; nothing depends on them here
    return ""


def _load_exported(path: Path, options: str) -> SentenceEncoder | None:
    """The encoder of a folder of `declutr export`, else None; `options` are those it has fixed, as they were given."""
    kind: type[OnnxEncoder | StaticEncoder] = OnnxEncoder
    if not (path / ONNX_SETTINGS).is_file():
        try:
            if kind_of(str(read_json(path / "modules.json")[0]["type"])) != MODULE:
                return None
        except (OSError, ValueError, LookupError, TypeError):
            return None
        kind = StaticEncoder
    if options:
        raise EncoderError(f"{path}: {options} has no effect on an export; export again with other settings")
    try:
        check_folder(path)
        check_tokenizer(path)
    except (DamagedError, OSError, ValueError) as error:
        raise EncoderError(f"{path} is not loaded: {error}") from error
    return kind(path)


def encoder_of_index(choice: EncoderChoice, model: str | None, *, trust_remote_code: bool) -> SentenceEncoder:
    """Load the encoder of an index, which may come from somebody else: the hub is not asked for a name in it.

    `model` is the user's name of the encoder, which replaces the index's.
    """
    if not model and not baseline(choice.model) and (problem := missing(choice.model)):
        raise EncoderError(f"add --model FOLDER if the encoder has moved; {problem}")
    options = choice.model_dump(exclude={"model", "trust_remote_code"})  # a file from somebody else grants no trust
    why = f"the index that names it may come from someone else; if you trust it: --model {choice.model}"
    with nullcontext() if model else cache_only(why):
        return load_encoder(model or choice.model, **options, trust_remote_code=trust_remote_code)


@lru_cache
def _say_once(message: str, warn: bool = False) -> None:
    (get_logger().warning if warn else get_logger().info)("%s", message)


def _close_enough(encoder: TransformerEncoder) -> TransformerEncoder:
    """The encoder in bfloat16, on a CPU in float32 if some texts show that it needs that."""
    if encoder.half is not None:
        exact, rows = replace(encoder, half=None, precision="fp32"), encoder.windows(_PROBES)[0]
        first, second = (unit_rows(side.embed_ids(rows).astype(np.float64)) for side in (encoder, exact))
        if (cosine := float((first * second).sum(axis=1).min())) < _LEAST_COSINE:
            _say_once(f"{encoder.name}: computed in fp32, as bf16 has a cosine of {cosine:.6f} to it", True)
            pack_linears(exact.encoder)
            return exact
    _say_once("embeddings are computed in bfloat16, which the device has units for; fp32 is exact and slower")
    return encoder


def in_bf16(encoder: Encoder) -> Encoder:
    """A copy whose transformer has its parameters in bfloat16; what follows the transformer stays as it is.

    Buffers stay too: angles of rotary positions in bfloat16 would be wrong from a few hundred tokens on.
    """
    half = copy.deepcopy(encoder)
    for parameter in half.model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return half


def pack_linears(module: nn.Module) -> None:
    """Makes the linear layers of a module use oneDNN in inference mode, if torch has it; other uses stay as they are.

    The packed weights take as much memory again. The weights must not change afterwards.
    """
    for layer in module.modules():
        # no subclass, whose forward may be another
        if type(layer) is nn.Linear and layer.weight.device.type == "cpu" and can_pack_linear(layer.weight.dtype):
            with torch.inference_mode():
                packed = pack_linear(layer.weight.detach(), _PACKED_ROWS)
            layer.forward = partial(_forward, layer, packed)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, packed: Tensor, inputs: Tensor) -> Tensor:
    """The layer's output; training and export go the ordinary way, because packed weights have no gradient."""
    if not torch.is_inference_mode_enabled() or inputs.dtype != packed.dtype or not inputs.numel():
        return F.linear(inputs, layer.weight, layer.bias)
    return packed_linear(inputs, packed, layer.bias)
