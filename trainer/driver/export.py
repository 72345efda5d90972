"""A trained encoder as a folder that transformers and sentence-transformers load."""

import shutil
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from declutr.common.bootstrap import compare
from declutr.common.console.logs import get_logger
from declutr.common.errors import CheckpointError, DamagedError
from declutr.common.storage import atomic_folder, hash_file, hash_json, put_back, set_aside, write_json, write_text
from declutr.trainer.build import build_encoder, build_objective, load_tokenizer
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS
from declutr.trainer.checkpoints.state import EXPORT, SETTINGS, RunState, read_settings
from declutr.trainer.checkpoints.weights import load_objective, load_parameters
from declutr.trainer.driver.model_card import CARD, model_card, without_paths
from declutr.trainer.metrics.config import num_validations
from declutr.trainer.model.behind import write_steps
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.language_model import max_span_tokens, silence
from declutr.trainer.objectives.scores import statistic_of
from declutr.trainer.run import RunPlan


def export(plan: RunPlan, done: int) -> Path:
    """Writes the run's folder `export` from its last or best checkpoint: weights, tokenizer, pooling, model card.

    An existing folder is kept if it was made from the same checkpoint and all of its files verify. `done` are the steps
    that the run has taken, fewer than planned if it ended early. Without a checkpoint that verifies: CheckpointError.
    """
    config, run = plan.config, plan.folder
    target = run / EXPORT
    folder = run / CHECKPOINTS
    best = config.export == "best"
    source = checkpoint.find_best(folder, config.validation.score) if best else checkpoint.find_latest(folder)
    if source is None:
        raise CheckpointError(f"{folder}: holds no whole checkpoint to export")
    path, state = source
    put_back(target)  # of an export that was killed between its two renames
    if target.exists() and (damage := _damage(target)):
        _keep(target, damage)
    if target.exists():
        before = read_settings(target)
        if before.checkpoint == _identity(state) or (best and _is_better(before.step, plan, state)):
            return target
        get_logger().info("%s was made from another checkpoint: exporting again", target)
    for left in run.glob(f".{EXPORT}.*.tmp"):  # left by a killed export
        shutil.rmtree(left)
    tokenizer, _ = load_tokenizer(plan.data[""][0], plan.manifest)
    encoder = build_encoder(config, tokenizer)
    load_parameters(path, encoder)
    with atomic_folder(target, replace=True) as aside:
        # a head that is neither pretrained nor trained by this run would look like a trained one
        write_encoder(encoder, tokenizer, aside, () if config.objective.mlm else encoder.load_report.head)
        objective = build_objective(plan.tasks[""], encoder, plan.manifest.short_documents)
        if layers := objective.exported():
            load_objective(path, objective)
        every_steps = config.validation.every_steps
        looks = 1 + num_validations(every_steps, plan.total_steps, done) if every_steps else 0
        verdict = verdict_of(looks, config.seed, state)
        steps = [*encoder.behind, *layers]
        write_steps(aside, steps)
        write_text(aside / CARD, model_card(plan, state, verdict["sentence"], bool(steps)))
        settings = {
            "step": state.step,
            "verdict": verdict,
            "pooling": config.encoder.pooling,
            "config": without_paths(config.model_dump(mode="json")),
            "checkpoint": _identity(state),
            "files": {name: hash_file(aside / name) for name in sorted(_files(aside))},
        }
        write_json(aside / SETTINGS, settings | {"hash": hash_json(settings)})
        # they may be the user's, and the new folder replaces the old one
        if other_files := sorted(_files(target) - _files(aside)):
            _keep(target, f"it also holds {', '.join(other_files)}")
    return target


def _damage(target: Path) -> str | None:
    """The damage of an export; None if it is complete and unaltered."""
    try:
        settings = read_settings(target)
    except FileNotFoundError:
        return f"{SETTINGS} is missing"
    except DamagedError as error:
        return str(error)
    files = _files(target)
    altered = [name for name, digest in settings.files.items() if name in files and hash_file(target / name) != digest]
    problems = [f"{name} is altered or truncated" for name in altered]
    problems += [f"{name} is missing" for name in sorted(set(settings.files) - files)]
    return ", ".join(problems) or None


def _is_better(step: int, plan: RunPlan, state: RunState) -> bool:
    """True if the export has the weights of a better step, whose checkpoint broke after the end of the run."""
    scores = checkpoint.history(plan.folder, plan.config.validation.score, max(step, state.step))
    both = {number: scores[number] for number in (step, state.step) if number in scores}
    if len(both) < 2 or checkpoint.from_best(both)[0] != step:
        return False
    message = "keeping %s: no checkpoint is as good as that of step %d, which is gone"
    get_logger().warning(message, plan.folder / EXPORT, step)
    return True


def _keep(target: Path, why: str) -> None:
    """Renames an old export, which may contain files of the user."""
    kept = set_aside(target)
    get_logger().warning("%s: %s; exporting again, the old folder is kept as %s", target, why, kept)


def _identity(state: RunState) -> str:
    """Hash of a checkpoint: its step, the hashes of its configuration and data, and the checksums of its files."""
    return hash_json([state.step, state.config_hash, state.data_hash, state.files])


def _files(folder: Path) -> set[str]:
    """Names of the files of an export, except the settings."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in paths} - {SETTINGS}


def write_encoder(encoder: Encoder, tokenizer: Any, folder: Path, untrained: tuple[str, ...] = ()) -> None:
    """Writes weights, tokenizer and pooling to an empty folder, from which they can be loaded.

    Weights that are `untrained` are left out, because they still have their random initial values.
    """
    weights = {name: weight for name, weight in encoder.model.state_dict().items() if name not in untrained}
    with silence():
        encoder.model.save_pretrained(folder, state_dict=weights if untrained else None)
    limit = max_span_tokens(encoder.model)  # that of a tokenizer trained here is 10^30, and longer texts are errors
    tokenizer.model_max_length = limit
    tokenizer.save_pretrained(folder)
    files = sentence_transformers_files(encoder.hidden_size, limit, encoder.config.pooling)
    if "add_pooling_layer" in signature(type(encoder.model.base_model)).parameters:
        # Without it, transformers would draw a pooler that nothing uses, and report its weights as missing.
        files["sentence_bert_config.json"]["model_args"] = {"add_pooling_layer": False}
    prompts = encoder.config.prompt, encoder.config.query_prompt
    files["config_sentence_transformers.json"] |= prompt_settings(encoder.prompts, *prompts)
    for name, value in files.items():
        write_json(folder / name, value)


def prompt_settings(prompts: dict[str, str], prompt: str | None, query_prompt: str | None = None) -> dict[str, Any]:
    """Prompts of config_sentence_transformers.json: those that a start declared, and those of the training.

    If they are not the same, that of the training goes before every text, or each before its role if it had two.
    """
    if {text for text in (prompt, query_prompt) if text} <= {*prompts.values()}:
        return {"prompts": prompts}
    if query_prompt not in (None, prompt or ""):
        return {"prompts": {**prompts, "query": query_prompt, "document": prompt or ""}}
    return {"prompts": {**prompts, "default": prompt}, "default_prompt_name": "default"}


def sentence_transformers_files(size: int, max_tokens: int, pooling: str) -> dict[str, Any]:
    """Contents of the small JSON files that sentence-transformers needs to load an encoder with its pooling."""
    return {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ],
        "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
        "config_sentence_transformers.json": {"similarity_fn_name": "cosine", "prompts": {}},
        "1_Pooling/config.json": {
            "word_embedding_dimension": size,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_max_tokens": pooling == "max",
            **({"pooling_mode": pooling} if pooling == "mean_without_cls" else {}),  # refused there, instead of ignored
        },
    }


def verdict_of(
    looks: int,  # validations of the whole run, the one of its start included; each scores the reporting rows
    seed: int,  # of the run, and so of the interval's draws
    state: RunState,  # of the exported checkpoint
) -> dict[str, Any]:
    """The difference between the start of a run and a checkpoint, for the summary, the model card and the last line.

    Returns:
        `sentence`, and with values of both: `score`, `start`, `exported`, `difference`, `rows`, `interval` (95%, or
        None with too few rows), `measurable` and `looks`.
    """
    reported = state.reported
    if not looks:
        return {"sentence": "not validated (validation.every_steps = 0)"}
    if reported is None:
        return {"sentence": "no score of held-out rows tells whether it is better than at the start"}
    if not reported.start or not reported.rows:
        missing = "the start of the run" if not reported.start else f"step {state.step}"
        return {"sentence": f"no verdict: {missing} was not validated"}
    start, rows = np.asarray(reported.start), np.asarray(reported.rows)
    if start.shape != rows.shape:
        return {"sentence": "no verdict: other rows were validated at the start, so validation.data has changed"}
    comparison = compare(start, rows, seed, statistic_of(start))
    return {
        "score": reported.score,
        "start": comparison.before,
        "exported": comparison.after,
        "difference": comparison.difference,
        "rows": comparison.rows,
        "interval": comparison.interval,
        "measurable": comparison.measurable,
        "looks": looks,
        "sentence": f"{reported.score} {comparison.before:.4f} at the start, {comparison.after:.4f} exported: "
        f"{comparison.sentence()}; these rows chose nothing and were scored {looks} times in this run",
    }
