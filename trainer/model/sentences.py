"""The parts of a sentence encoder's folder that training does not take over: further modules, another pooling."""

from pathlib import Path
from typing import Any

from common.hub import hub_or_cache
from common.records import DamagedError, read_record

_TAKEN_OVER = ("Transformer", "Pooling", "Normalize")  # scores are cosines, the same with and without normalisation
_MODES = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}


def left_out(pretrained: str | None, pooling: str) -> str | None:
    """A line about modules of a sentence-transformers folder that the run begins without; None where there are none.

    Args:
        pretrained: name or folder of the encoder; None: it begins from scratch.
        pooling: of the run, `cls`, `mean` or `max`.
    """
    if pretrained is None:
        return None
    try:
        modules = _read(pretrained, "modules.json", list[dict[str, Any]]) or []
        kinds = {str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
        found = [f"its module {kind} is not used" for kind in kinds if kind not in _TAKEN_OVER]
        own = _read(pretrained, f"{kinds['Pooling']}/config.json", dict[str, Any]) if "Pooling" in kinds else None
    except DamagedError as error:
        return f"encoder.pretrained = {pretrained}: {error}; its pooling is not known"
    if own and not (own.get("pooling_mode") == pooling or own.get(f"pooling_mode_{_MODES[pooling]}")):
        found.append(f"its pooling is another than encoder.pooling = {pooling}")
    if not found:
        return None
    return f"encoder.pretrained = {pretrained}: {', '.join(found)}; embeddings begin as others than its own"


def _read(pretrained: str, name: str, kind: Any) -> Any:
    """A small file of the encoder; None where it has none.

    Raises:
        DamagedError: it is not JSON of that kind.
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
