"""Workers of an embedding job: this process, or Ray actors with an encoder each."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from evaluation.embedding.config import EmbedConfig, EmbedError
from evaluation.embedding.units import EmbeddingSidecar, embed_unit
from evaluation.encoders.choice import encoder_of
from evaluation.encoders.protocol import SentenceEncoder
from pipeline.job.units import Unit

_CPUS_PER_WORKER = 4
_RESTARTS = 10
"""Maximum restarts of a worker that dies; an input that crashes a library would otherwise restart it for ever."""


class Progress:
    """Texts per second, shown next to the bar of input bytes."""

    def __init__(self, bar: Any) -> None:
        self._bar, self._texts = bar, 0

    def add(self, texts: int, num_bytes: int) -> None:
        """Record newly embedded texts and input bytes."""
        self._texts += texts
        seconds = max(1e-9, float(self._bar.format_dict["elapsed"]))
        self._bar.set_postfix_str(f"{self._texts:,} texts, {self._texts / seconds:,.0f} a second", refresh=False)
        self._bar.update(num_bytes)


def embed_here(
    config: EmbedConfig,
    todo: Sequence[tuple[Unit, str]],
    folder: Path,
    encoder: SentenceEncoder,
    progress: Progress,
) -> Iterator[EmbeddingSidecar]:
    """Embed units in this process; yield their sidecars."""
    for unit, identity in todo:
        yield embed_unit(unit, folder, config, identity, encoder, progress.add)


def embed_on_ray(
    config: EmbedConfig, todo: Sequence[tuple[Unit, str]], folder: Path, progress: Progress
) -> Iterator[EmbeddingSidecar]:
    """Embed units on Ray, on all GPUs or else all CPUs; yield their sidecars as they finish.

    Raises:
        EmbedError: no session can be started, a unit cannot be embedded, or workers keep dying.
    """
    if not todo:
        return
    from common.session import start_ray
    from common.session_config import SessionError

    try:
        start_ray()
    except SessionError as error:
        raise EmbedError(str(error)) from error
    import ray  # after the session, which keeps it quiet
    from ray.exceptions import RayActorError, WorkerCrashedError

    resources = ray.cluster_resources()
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
    workers = min(config.workers or gpus or max(1, cpus // _CPUS_PER_WORKER), gpus or cpus)
    share: dict[str, int] = {"num_gpus": 1} if gpus else {"num_cpus": max(1, min(_CPUS_PER_WORKER, cpus // workers))}
    items = [{"unit": unit.model_dump_json(), "identity": identity} for unit, identity in todo]
    sizes = {unit.name: unit.num_bytes for unit, _ in todo}
    rows = ray.data.from_items(items, override_num_blocks=len(items)).map(
        UnitEmbedder,
        fn_constructor_kwargs={"config": config, "folder": str(folder)},
        concurrency=min(workers, len(items)),
        max_restarts=_RESTARTS,
        max_task_retries=_RESTARTS,
        **share,
    )
    try:
        for row in rows.iter_rows():
            if row["problem"]:
                raise EmbedError(f"{row['problem']}. Finished units are kept; run the same command to continue")
            sidecar = EmbeddingSidecar.model_validate_json(row["sidecar"])
            progress.add(sidecar.written, sizes[sidecar.unit])
            yield sidecar
    except (RayActorError, WorkerCrashedError) as error:
        raise EmbedError(
            f"workers keep dying ({error}). Finished units are kept; run the same command to continue"
        ) from error


class UnitEmbedder:
    """Ray worker with an encoder that embeds one unit after the other."""

    def __init__(self, config: EmbedConfig, folder: str) -> None:
        self._config, self._folder = config, Path(folder)
        self._encoder = encoder_of(config.choice, trust_remote_code=config.choice.trust_remote_code)

    def __call__(self, row: dict[str, str]) -> dict[str, str]:
        """Embed `{"unit": JSON, "identity": hash}`; return `{"sidecar": JSON, "problem": words}`."""
        unit = Unit.model_validate_json(row["unit"])
        try:
            sidecar = embed_unit(unit, self._folder, self._config, row["identity"], self._encoder)
        except (OSError, EmbedError) as error:  # if raised here, users would see a traceback of Ray
            return {"sidecar": "", "problem": str(error)}
        return {"sidecar": sidecar.model_dump_json(), "problem": ""}
