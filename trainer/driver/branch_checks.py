"""Checks of additional branches before Ray starts."""

from pipeline.shards.content import MEDIA_KINDS
from pipeline.shards.manifest import Manifest
from trainer.driver.encoder_checks import encoder_problems
from trainer.driver.objective_checks import objective_problems
from trainer.model.language_model import UnfitEncoderError
from trainer.model.layouts import patch_problem
from trainer.setup.build import build_encoder, load_tokenizer
from trainer.setup.cache import data_folder
from trainer.setup.config import TrainConfig
from trainer.setup.turns import build_frontend


def branch_problems(config: TrainConfig, manifests: dict[str, Manifest]) -> list[str]:
    """Problems of the objectives and encoders of the additional branches, one line each, which starts with the key.

    Args:
        config: of the run.
        manifests: manifests of the shards by name of the branch; "" for the main one.
    """
    found = []
    for name in config.auxiliary_tasks:
        branch, manifest = config.of_branch(name), manifests[name]
        wrong = objective_problems(branch)
        if not wrong and manifest.content.kind in MEDIA_KINDS:
            wrong = _frontend_problems(config, name, manifest)
        elif not wrong:
            wrong = encoder_problems(branch, manifest)
        found += [f"auxiliary_tasks.{name}.{line}" for line in wrong]
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
