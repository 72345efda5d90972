"""Modules of a sentence-transformers folder: its transformer, its pooling, and the steps after pooling.

Modules that cannot be computed exactly here are refused by name.
"""

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from torch import nn

from declutr.common.errors import DamagedError, EncoderError
from declutr.encoders.protocol import Pooling, check_prompts, file_of
from declutr.trainer.model.behind import Dense, ModuleFiles, unread

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLING = ("word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt")
_OPTIONS = {
    **dict.fromkeys(("__version__", "model_type", "prompts", "default_prompt_name", "truncate_dim"), ()),
    "similarity_fn_name": (None, "cosine"),  # embeddings are compared by their cosine here
}  # keys of config_sentence_transformers.json that are read, and the values of others with which nothing differs
_TRANSFORMER = {
    **dict.fromkeys(("max_seq_length", "do_lower_case", "unpad_inputs"), ()),
    "transformer_task": ("feature-extraction",),
    "model_args": ({}, {"add_pooling_layer": False}),  # no pooler is loaded, whatever the file says
    "module_output_name": ("token_embeddings",),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}},),
}  # the same for sentence_bert_config.json
_MOST_MODULES = 32
_MOST_NUMBER = 2**24  # of tokens or numbers of an embedding
_OF_MODULES = ("1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json")


@dataclass(frozen=True)
class Recipe:
    """Steps by which a sentence-transformers folder makes embeddings."""

    subfolder: str
    pooling: Pooling
    after: nn.Sequential  # dense layers and normalisation, in order
    size: int | None  # numbers in an embedding; None: the transformer's
    cut: int | None = None  # numbers to which embeddings are cut (truncate_dim); None: all
    max_tokens: int | None = None  # length to which texts are cut; None: the transformer's limit
    lower_case: bool = False
    prompt: str = ""
    prompts: dict[str, str] = field(default_factory=dict)  # all prompts by name, of which `prompt` is the default one
    pools_prompt: bool = True  # the tokens of a prompt are among those that are pooled


def read_recipe(name: str, pooling: Pooling | None = None) -> Recipe | None:
    """Read the recipe of a folder or name at the hub; None without modules.json. `pooling` overrides that declared."""
    files = ModuleFiles(partial(file_of, name))
    try:
        modules = files.modules()
        if modules is not None:
            return _recipe(name, files, modules, pooling)
    except (DamagedError, OSError) as error:
        raise EncoderError(f"{name}: {error}; copy or download it again") from error
    if left := [file for file in _OF_MODULES if Path(name).is_dir() and (Path(name) / file).is_file()]:
        raise EncoderError(
            f"{name}: has {left[0]} of sentence-transformers but no modules.json, which defines the steps after "
            "the transformer; the folder is incomplete, copy or download it again"
        )
    return None


def _recipe(name: str, files: ModuleFiles, modules: list[tuple[str, str]], pooling: Pooling | None) -> Recipe:
    if len(modules) > _MOST_MODULES:
        raise EncoderError(
            f"{name}: modules.json lists {len(modules):,} modules; at most {_MOST_MODULES} are supported"
        )
    kinds = [kind for kind, _ in modules]
    if own := [kind for kind in kinds if "." in kind]:
        raise EncoderError(
            f"{name}: its module {own[0]} is Python code of its own, which runs in sentence-transformers alone "
            "(SentenceTransformer(NAME, trust_remote_code=True)); take another encoder"
        )
    if kinds[:2] != ["Transformer", "Pooling"] or not set(kinds[2:]) <= {"Dense", "Normalize", "Dropout"}:
        raise EncoderError(
            f"{name}: its modules are {', '.join(kinds)}; supported are a Transformer with Pooling, then Dense and "
            "Normalize"
        )
    steps = files.steps(modules[2:])
    layers = [step.linear for step in steps if isinstance(step, Dense)]
    folders = [folder for kind, folder in modules if kind == "Dense"]
    for folder, (before, after) in zip(folders[1:], pairwise(layers), strict=True):  # torch would name no file
        if before.out_features != after.in_features:
            raise EncoderError(
                f"{name}: its dense layer {folder} takes {after.in_features} numbers, the one before "
                f"{before.out_features}"
            )
    limits = files.settings(str(PurePosixPath(modules[0][1], "sentence_bert_config.json"))) or {}
    options = files.settings("config_sentence_transformers.json") or {}
    unread(f"{name}: sentence_bert_config.json", limits, _TRANSFORMER)
    unread(f"{name}: config_sentence_transformers.json", options, _OPTIONS)
    cut = _limit(f"{name}: config_sentence_transformers.json", options, "truncate_dim")
    length = _limit(f"{name}: sentence_bert_config.json", limits, "max_seq_length")
    prompt, prompts = _prompts(name, options)
    pooled = files.settings(f"{modules[1][1]}/config.json")
    if pooled is None:
        raise DamagedError(f"{modules[1][1]}/config.json is missing; the folder is incomplete")
    unread(f"{name}: {modules[1][1]}/config.json", pooled, dict.fromkeys((*_POOLING, *_FLAGS), ()))
    return Recipe(
        subfolder=modules[0][1],
        pooling=pooling or _pooling(name, pooled),
        after=nn.Sequential(*steps),
        size=layers[-1].out_features if layers else None,
        cut=cut,
        max_tokens=length,
        lower_case=bool(limits.get("do_lower_case")),
        prompt=prompt,
        prompts=prompts,
        pools_prompt=bool(pooled.get("include_prompt", True)),
    )


def _limit(where: str, settings: dict[str, Any], key: str) -> int | None:
    """A number of settings of a file, which may lack it."""
    value: Any = settings.get(key)
    if value is None or (type(value) is int and 1 <= value <= _MOST_NUMBER):
        return value
    raise EncoderError(f"{where} has {key} = {str(value)[:40]}; it must be a number from 1 to {_MOST_NUMBER:,}")


def _prompts(name: str, options: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The default prompt, empty if there is none, and all prompts by name."""
    chosen, prompts = options.get("default_prompt_name"), options.get("prompts") or {}
    valid = isinstance(prompts, dict) and all(isinstance(text, str | None) for text in prompts.values())
    if not valid or not (chosen is None or isinstance(chosen, str)):
        raise EncoderError(f"{name}: config_sentence_transformers.json is damaged: its prompts must be texts by name")
    if chosen is not None and chosen not in prompts:
        raise EncoderError(
            f"{name}: config_sentence_transformers.json has default_prompt_name = {chosen}, and its prompts are "
            f"{', '.join(prompts) or 'none'}; name one of them, or remove it"
        )
    texts = {key: text for key, text in prompts.items() if text is not None}
    check_prompts(name, texts)
    return texts.get(chosen, "") if chosen else "", texts


def _pooling(name: str, settings: dict[str, Any]) -> Pooling:
    """Pooling from the old form (one flag per kind) or the new form."""
    declared = settings.get("pooling_mode", [kind for flag, kind in _FLAGS.items() if settings.get(flag)] or "mean")
    kinds = [declared] if not isinstance(declared, list) else declared
    for kind in get_args(Pooling):
        if kinds == [kind]:
            return kind
    raise EncoderError(
        f"{name}: pooling {'+'.join(map(str, kinds))!r} is not one of {', '.join(get_args(Pooling))}; another pooling "
        "than that of its training gives other embeddings, so take another encoder"
    )
