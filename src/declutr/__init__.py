"""Sentence encoders from long documents without labels, on Ray: `train`, `adapt`, `embed`, `search`, and so on.

The functions are those that the commands call. Each is imported at its first use, with the libraries that it needs.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from declutr.adaptation.job import adapt as adapt
    from declutr.cli.encoders import export as export
    from declutr.cli.evaluate import evaluate as evaluate
    from declutr.embedding.build import index as index
    from declutr.embedding.index import Searcher as Searcher
    from declutr.embedding.index import search as search
    from declutr.embedding.job import embed as embed
    from declutr.encoders.loading import load_encoder as load  # noqa: F401
    from declutr.pipeline.prepare import prepare as prepare
    from declutr.trainer.train import train as train

_PLACES = {
    "prepare": "declutr.pipeline.prepare:prepare",
    "train": "declutr.trainer.train:train",
    "adapt": "declutr.adaptation.job:adapt",
    "load": "declutr.encoders.loading:load_encoder",
    "embed": "declutr.embedding.job:embed",
    "evaluate": "declutr.cli.evaluate:evaluate",
    "export": "declutr.cli.encoders:export",
    "index": "declutr.embedding.build:index",
    "search": "declutr.embedding.index:search",
    "Searcher": "declutr.embedding.index:Searcher",
} | {
    name: f"declutr.common.errors:{name}"
    for name in (
        *("CheckpointError", "ConfigError", "DamagedError", "DataError", "DeclutrError", "EncoderError", "RemoteError"),
        *("RunLockedError", "RunStoppedError", "SessionError", "ShardError", "TrainingFailedError", "UsageError"),
    )
}
__all__ = list(_PLACES)

# cuBLAS reads it at a process's first product on a GPU, which may come before a training; see `repeat_bits`.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'declutr' has no attribute {name!r}")
    module, _, function = _PLACES[name].partition(":")
    globals()[name] = value = getattr(import_module(module), function)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
