"""The official procedure on given embeddings, by a checkout of facebookresearch/SentEval.

A checkout (read at 5d6dc11) does not run on current Python and numpy versions, nor without CUDA. While it runs,
`.cuda()` leaves everything on the CPU, `torch.device("cuda")` is the CPU, `inspect.getargspec` exists, and ragged
arrays become object arrays. Its computations are unchanged. The time of both sides starts after loading and embedding.
"""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import record
from declutr.evaluation.senteval.classifier.config import ClassifierConfig
from declutr.evaluation.senteval.data.taskdata import EMPTY, TaskData

Array = NDArray[Any]
Scores = dict[str, float]


class _Over:
    """Module as released code sees it, with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        names = self.__dict__["_names"]
        return names[name] if name in names else getattr(self.__dict__["_module"], name)


class Checkout:
    """The released code itself.

    Args:
        folder: folder of the checkout.
        data: folder with `downstream` and `probing`, which it reads with its own loaders.
    """

    name = "facebookresearch/SentEval"

    def __init__(self, folder: Path, data: Path) -> None:
        if not (folder / "senteval" / "engine.py").is_file():
            raise ValueError(f"{folder}: not a checkout of facebookresearch/SentEval: senteval/engine.py is missing")
        self.data = data
        sys.path.insert(0, str(folder))
        try:
            self.engine: ModuleType = importlib.import_module("senteval.engine")
        finally:
            sys.path.remove(str(folder))

    def score(
        self, data: TaskData, rows: Mapping[str, int], embeddings: Array, config: ClassifierConfig
    ) -> tuple[Scores, Array]:
        """Return a task's scores, and its wall and processor seconds."""
        started: list[Array] = []

        def batcher(_: Any, batch: Sequence[Sequence[str]]) -> Array:
            return embeddings[[rows[" ".join(words) or EMPTY] for words in batch]]

        classifier = {
            "nhid": config.num_hidden,
            "optim": config.optimizer,
            "batch_size": config.batch_size,
            "tenacity": config.tenacity,
            "epoch_size": config.epoch_size,
            "dropout": config.dropout,
            "max_epoch": config.max_epoch,
        }
        params = {"task_path": str(self.data), "usepytorch": True, "kfold": config.num_folds, "classifier": classifier}
        with _today():
            engine = self.engine.SE({**params, "seed": config.seed}, batcher, lambda *_: started.append(record.now()))
            found = engine.eval(data.task.name)
            elapsed = record.now() - started[-1]
        return _flat(found), elapsed


def _flat(found: Mapping[str, Any]) -> Scores:
    """Rename the released code's results to this project's names."""
    if "all" in found:
        return {f"{kind}.{way}": float(found["all"][kind][way]) for kind in ("spearman", "pearson") for way in _WAYS}
    names = ("acc", "devacc", "f1", "devpearson", "pearson", "spearman", "mse")
    return {name: float(found[name]) for name in names if name in found}


_WAYS = ("mean", "wmean")


@contextlib.contextmanager
def _today() -> Iterator[None]:
    """Apply the shims while released code runs."""

    def stay(self: Any, *_: Any, **__: Any) -> Any:
        return self

    def ragged(values: Any, *arguments: Any, **options: Any) -> Array:
        try:
            return np.array(values, *arguments, **options)
        except ValueError:
            return np.array(values, dtype=object)

    cuda = _Over(torch.cuda, is_available=lambda: True, manual_seed=lambda _: None)
    seen = _Over(torch, device=lambda _: torch.device("cpu"), cuda=cuda)
    replaced = {
        "torch": (torch, seen),
        "np": (np, _Over(np, array=ragged)),
        "inspect": (inspect, _Over(inspect, getargspec=inspect.getfullargspec)),
    }
    with contextlib.ExitStack() as stack:
        for owner in (torch.Tensor, torch.nn.Module):
            stack.enter_context(patch.object(owner, "cuda", stay))
        for path, module in list(sys.modules.items()):
            for name, (real, shim) in replaced.items() if path.partition(".")[0] == "senteval" else ():
                if getattr(module, name, None) is real:
                    stack.enter_context(patch.object(module, name, shim))
        yield
