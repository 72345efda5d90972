"""Workers of `declutr embed` on Ray, each with an encoder of its own."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from declutr.embedding.config import EmbedConfig, EmbedError
from declutr.embedding.units import EmbeddingSidecar, embed_unit
from declutr.encoders.protocol import SentenceEncoder, precision_of, vectors_fingerprint
from declutr.pipeline.job.units import Unit

_CPUS_PER_WORKER = 4
_RESTARTS = 10
"""Maximum restarts of a worker that dies; an input that crashes a library would otherwise restart it for ever."""


def embed_on_ray(
    config: EmbedConfig,
    todo: Sequence[tuple[Unit, str]],
    folder: Path,
    encoder: SentenceEncoder,
    told: Callable[[int, int], None],
) -> Iterator[EmbeddingSidecar]:
    """Embed units on Ray, on all GPUs or else all CPUs; yield their sidecars as they finish.

    Every worker loads the encoder by its name, and refuses another than `encoder`. `told` is called with the numbers of
    newly embedded texts and newly read input bytes.

    Raises:
        EmbedError: no session can be started, a unit cannot be embedded, or workers keep dying.
    """
    if not todo:
        return
    from declutr.common.cluster import SessionError
    from declutr.common.session import start_ray

    try:
        start_ray()
    except SessionError as error:
        raise EmbedError(str(error)) from error
    import ray  # after the session, which keeps it quiet
    from ray.exceptions import RayActorError, WorkerCrashedError

    resources = ray.cluster_resources()
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
    workers = max(1, min(config.workers or gpus or cpus // _CPUS_PER_WORKER, gpus or cpus))  # a head may have no CPU
    share: dict[str, int] = {"num_gpus": 1} if gpus else {"num_cpus": max(1, min(_CPUS_PER_WORKER, cpus // workers))}
    items = [{"unit": unit.model_dump_json(), "identity": identity} for unit, identity in todo]
    sizes = {unit.name: unit.num_bytes for unit, _ in todo}
    rows = ray.data.from_items(items, override_num_blocks=len(items)).map(
        UnitEmbedder,
        fn_constructor_kwargs={"config": config, "folder": str(folder), "vectors": vectors_fingerprint(encoder)},
        concurrency=min(workers, len(items)),
        max_restarts=_RESTARTS,
        max_task_retries=_RESTARTS,
        **share,
    )
    try:
        for row in rows.iter_rows():
            if row["problem"]:
                raise EmbedError(row["problem"])
            sidecar = EmbeddingSidecar.model_validate_json(row["sidecar"])
            told(sidecar.written, sizes[sidecar.unit])
            yield sidecar
    except (RayActorError, WorkerCrashedError) as error:
        raise EmbedError(
            f"workers keep dying ({error}). Finished units are kept; run the same command to continue"
        ) from error


class UnitEmbedder:
    """Ray worker with an encoder that embeds one unit after the other, if its `vectors_fingerprint` is `vectors`.

    The encoder that a name means may change meanwhile: that of a run is its newest checkpoint.
    """

    def __init__(self, config: EmbedConfig, folder: str, vectors: str) -> None:
        from declutr.encoders.loading import encoder_of

        self._config, self._folder = config, Path(folder)
        self._encoder = encoder_of(config.choice, trust_remote_code=config.choice.trust_remote_code)
        self._problem = ""
        if vectors_fingerprint(self._encoder) != vectors:
            self._problem = (
                f"{config.choice.model}: a worker loaded another encoder ({precision_of(self._encoder)}) than this "
                "command. Name a checkpoint or an export that does not change, or --precision fp32 or bf16"
            )

    def __call__(self, row: dict[str, str]) -> dict[str, str]:
        """Embed `{"unit": JSON, "identity": hash}`; return `{"sidecar": JSON, "problem": words}`."""
        if self._problem:
            return {"sidecar": "", "problem": self._problem}
        unit = Unit.model_validate_json(row["unit"])
        try:
            sidecar = embed_unit(unit, self._folder, self._config, row["identity"], self._encoder)
        except (OSError, EmbedError) as error:  # if raised here, users would see a traceback of Ray
            return {"sidecar": "", "problem": f"{error}. Finished units are kept; run the same command to continue"}
        return {"sidecar": sidecar.model_dump_json(), "problem": ""}
