"""Checks of auxiliary tasks before Ray starts."""

from declutr.pipeline.shards.content import MEDIA_KINDS
from declutr.trainer.driver.encoder_checks import encoder_problems
from declutr.trainer.driver.objective_checks import objective_problems
from declutr.trainer.driver.resolved import ResolvedRun
from declutr.trainer.model.language_model import UnfitEncoderError
from declutr.trainer.model.layouts import patch_problem
from declutr.trainer.setup.build import build_encoder, load_tokenizer
from declutr.trainer.setup.tasks import build_frontend


def task_problems(run: ResolvedRun) -> list[str]:
    """Problems of the objectives and encoders of the auxiliary tasks, one line each, which starts with the key."""
    found = []
    for name in run.config.auxiliary_tasks:
        task, manifest = run.config.of_task(name), run.manifests[name]
        wrong = objective_problems(task)
        if not wrong and manifest.content.kind in MEDIA_KINDS:
            wrong = _frontend_problems(run, name)
        elif not wrong:
            wrong = encoder_problems(run, name)
        found += [f"auxiliary_tasks.{name}.{line}" for line in wrong]
    return found


def _frontend_problems(run: ResolvedRun, name: str) -> list[str]:
    """Problems of the frontend: the ViT that it names, and an encoder whose layers cannot read patches."""
    encoder = build_encoder(run.config, load_tokenizer(run.data[""], run.manifest)[0])
    try:
        frontend = build_frontend(run.config.of_task(name), encoder, run.manifests[name].content)
    except (UnfitEncoderError, OSError) as error:
        return [str(error).splitlines()[0]]
    problem = patch_problem(encoder, frontend) if frontend is not None else None
    return [f"frontend: {problem}"] if problem else []
