"""Parts of a sentence-transformers folder that training does not use: further modules, a different pooling."""

from pathlib import Path
from typing import Any

from common.hub import hub_or_cache
from common.records import DamagedError, read_record

_TAKEN_OVER = ("Transformer", "Pooling", "Normalize")  # scores are cosines, which normalisation does not change
_MODES = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}


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
    from transformers.utils import cached_file

    with hub_or_cache():
        path = cached_file(
            pretrained,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    return None if path is None else read_record(Path(path), kind)
