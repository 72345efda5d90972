"""Tasks of MTEB, by name, for every encoder of this project; MTEB loads the data and computes the scores."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mteb
import numpy as np
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.similarity_functions import cos_sim, pairwise_cos_sim
from numpy.typing import NDArray

from declutr.common.errors import EncoderError
from declutr.common.storage import write_json
from declutr.encoders.protocol import Role, SentenceEncoder, in_role, vectors_fingerprint


class MtebEncoder:
    """Adapter from an encoder of this project to MTEB's interface; similarity is the cosine."""

    def __init__(self, encoder: SentenceEncoder) -> None:
        self._encoder = encoder
        name = re.sub(r"[^\w.-]+", "_", encoder.name).strip("_")[-60:]  # MTEB makes a folder of it
        revision = vectors_fingerprint(encoder)[:16]  # MTEB finds earlier results by name and revision
        metadata = {"name": f"declutr/{name}", "revision": revision, "embed_dim": encoder.size}
        self.mteb_model_meta = ModelMeta.create_empty(metadata | {"similarity_fn_name": ScoringFunction.COSINE})

    def encode(self, inputs: Any, *, prompt_type: Any = None, **_: Any) -> NDArray[np.float32]:
        """Embeddings `(N, size)` of the texts of MTEB's batches, in their order; MTEB names the role of the texts."""
        role: Role = "query" if getattr(prompt_type, "value", "") == "query" else "document"
        encoder = in_role(self._encoder, role) if prompt_type else self._encoder
        return encoder.encode([text for batch in inputs for text in batch["text"]])

    def similarity(self, first: Any, second: Any) -> Any:
        """Cosines `(N, M)` of all pairs."""
        return cos_sim(first, second)

    def similarity_pairwise(self, first: Any, second: Any) -> Any:
        """Cosines `(N,)` row by row."""
        return pairwise_cos_sim(first, second)


def choose_mteb(names: Sequence[str]) -> list[Any]:
    """Find the tasks of these names."""
    try:
        return list(mteb.get_tasks(tasks=list(names)))
    except KeyError as error:
        raise EncoderError(f"--mteb: {str(error.args[0]).removeprefix('KeyError: ')}") from error


def score_mteb(
    encoder: SentenceEncoder, tasks: Sequence[Any], output: Path, say: Callable[[str], None]
) -> dict[str, float]:
    """Compute main scores by task, in percent if MTEB's are between 0 and 1; `OUTPUT/mteb` holds all of MTEB's figures.

    A task with a result there for the same encoder is not computed again.
    """
    cache = mteb.ResultCache(output / "mteb")  # keeps each task, so that a killed call computes the rest
    scores: dict[str, float] = {}
    for task in tasks:
        name = task.metadata.name
        try:
            result = mteb.evaluate(MtebEncoder(encoder), task, cache=cache, co2_tracker=False, show_progress_bar=False)
        except (OSError, ValueError, KeyError) as error:
            raise EncoderError(f"{encoder.name}: MTEB's task {name} has no score: {error}") from error
        scores[name] = 100 * float(result.task_results[0].get_score())
        say(f"{encoder.name}: {name} {scores[name]:.2f} ({task.metadata.main_score})")
    return scores


def write_mteb(scores: dict[str, dict[str, float]], output: Path) -> None:
    """Write `mteb.json`: main scores in percent by encoder and task."""
    write_json(output / "mteb.json", {"mteb": mteb.__version__, "encoders": scores})
