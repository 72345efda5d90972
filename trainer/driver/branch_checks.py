"""Checks of additional branches before Ray starts."""

from pipeline.shards.content import MEDIA_KINDS
from pipeline.shards.manifest import Manifest
from trainer.driver.encoder_checks import encoder_problems
from trainer.driver.objective_checks import data_problems
from trainer.model.language_model import UnfitEncoderError
from trainer.model.layouts import patch_problem
from trainer.setup.build import build_encoder, load_tokenizer
from trainer.setup.cache import data_folder
from trainer.setup.config import TrainConfig
from trainer.setup.turns import build_frontend


def branch_problems(config: TrainConfig, manifests: dict[str, Manifest]) -> list[str]:
    """Problems of the additional branches whose shards could be read, one line each, which starts with the key.

    Args:
        config: of the run.
        manifests: manifests of the shards by name of the branch; "" for the main one.
    """
    found = []
    main = manifests.get("")
    for name, manifest in manifests.items():
        if not name:
            continue
        wrong = data_problems(config.of_branch(name), manifest)
        branch, kind = config.also[name], manifest.content.kind
        if kind in MEDIA_KINDS:
            wrong += [] if wrong or main is None else _frontend_problems(config, name, manifest)
        else:
            if branch.frontend.model_fields_set:
                wrong.append(f"frontend: the shards hold {kind}, which have no patches; remove it")
            if main and main.tokenizer and manifest.tokenizer and main.tokenizer != manifest.tokenizer:
                wrong.append(
                    f"data = {branch.data}: was prepared with another tokenizer than data = {config.data}; prepare it "
                    "with that one"
                )
            wrong += [] if wrong else encoder_problems(config.of_branch(name), manifest)
        found += [f"also.{name}.{line}" for line in wrong]
    return found


def _frontend_problems(config: TrainConfig, name: str, manifest: Manifest) -> list[str]:
    """Problems of the frontend: the ViT that it names, and an encoder whose layers cannot read patches."""
    encoder = build_encoder(config, load_tokenizer(data_folder(config.data, config.cache))[0])
    try:
        frontend = build_frontend(config.of_branch(name), encoder, manifest.content)
    except (UnfitEncoderError, OSError) as error:
        return [str(error).splitlines()[0]]
    problem = patch_problem(encoder, frontend) if frontend is not None else None
    return [f"frontend: {problem}"] if problem else []
