"""Parts of a sentence-transformers folder: the steps behind its pooling, and what training does not use."""

from pathlib import Path
from typing import Any

from declutr.common.errors import DamagedError
from declutr.common.hub import hub_or_cache
from declutr.common.storage import read_record
from declutr.trainer.model.behind import Normalize, Step, load_dense

_TAKEN_OVER = ("Transformer", "Pooling", "Dense", "Normalize")
_MODES = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}


def read_behind(pretrained: str | None) -> list[Step]:
    """The dense layers of a pretrained encoder, and normalisations before the last of them; trained with it.

    A normalisation at the end is left out, because cosines do not change by it.

    Raises:
        ValueError: a dense layer is damaged or of a kind that is not supported.
    """
    steps: list[Step] = []
    if pretrained is None:
        return steps
    modules = _read(pretrained, "modules.json", list[dict[str, Any]]) or []
    for module in modules:
        kind, folder = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if kind == "Normalize":
            steps.append(Normalize())
        elif kind == "Dense":
            if Path(folder).is_absolute() or ".." in Path(folder).parts:
                raise ValueError(f"modules.json names {folder}, which is outside of the encoder's folder")
            settings = _read(pretrained, f"{folder}/config.json", dict[str, Any])
            weights = _path(pretrained, f"{folder}/model.safetensors")
            if settings is None or weights is None:
                raise ValueError(f"its dense layer {folder} lacks config.json or model.safetensors")
            steps.append(load_dense(settings, weights, folder))
    while steps and isinstance(steps[-1], Normalize):
        steps.pop()
    return steps


def left_out(pretrained: str | None, pooling: str) -> str | None:
    """A message about modules of a sentence-transformers folder that the run does not use, or None.

    Args:
        pretrained: name or folder of the encoder; None for training from scratch.
        pooling: pooling of the run.
    """
    if pretrained is None:
        return None
    try:
        modules = _read(pretrained, "modules.json", list[dict[str, Any]]) or []
        kinds = {str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
        found = [f"its module {kind} is not used" for kind in kinds if kind not in _TAKEN_OVER]
        own = _read(pretrained, f"{kinds['Pooling']}/config.json", dict[str, Any]) if "Pooling" in kinds else None
    except DamagedError as error:
        return f"encoder.pretrained = {pretrained}: {error}; its pooling is unknown"
    if own and not (own.get("pooling_mode") == pooling or own.get(f"pooling_mode_{_MODES.get(pooling)}")):
        found.append(f"its pooling differs from encoder.pooling = {pooling}")
    if not found:
        return None
    return (
        f"encoder.pretrained = {pretrained}: {', '.join(found)}; initial embeddings differ from those of that encoder"
    )


def _read(pretrained: str, name: str, kind: Any) -> Any:
    """Reads a small file of the encoder; None if it does not exist.

    Raises:
        DamagedError: the file is not JSON of that kind.
    """
    path = _path(pretrained, name)
    return None if path is None else read_record(path, kind)


def _path(pretrained: str, name: str) -> Path | None:
    """Path of a file of the encoder; None if it does not exist."""
    from transformers.utils import cached_file

    with hub_or_cache():
        path = cached_file(
            pretrained,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    return None if path is None else Path(path)
