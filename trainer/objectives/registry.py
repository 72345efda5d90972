"""Objectives by the `kind` of their settings: those of this project and those of installed packages."""

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import BeforeValidator, Field

from trainer.objectives.config import ObjectiveConfig
from trainer.objectives.declutr.config import DeclutrConfig

GROUP = "declutr.objectives"
"""Entry point group: the name is the kind, the value the `ObjectiveConfig` subclass."""
RESERVED = frozenset({"loss", "grad_norm", "lr", "num_selected", "num_tokens", "padding_share", "flops", "skipped"}) | {
    "kind",
    "step",
    "time",
    "seconds",
    "batch_digest",
    "mfu",
    "peak_memory_mib",
    "data_wait_share",
    "tokens_per_second",
    "documents_per_second",
}
"""Keys of a line in `metrics.jsonl` that no loss term may have."""
DEFAULT = DeclutrConfig()
"""The objective of a configuration that does not name one."""


def load_kinds() -> dict[str, type[ObjectiveConfig]]:
    """Settings classes by kind; importing one must not import torch.

    Raises:
        TypeError: an installed package's entry point is not an objective of that kind.
    """
    kinds: dict[str, type[ObjectiveConfig]] = {DEFAULT.kind: type(DEFAULT)}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        loaded = point.load()
        is_config = isinstance(loaded, type) and issubclass(loaded, ObjectiveConfig)
        if not is_config or loaded.model_fields["kind"].default != point.name or point.name in kinds:
            raise TypeError(
                f"entry point {point.name} = {point.value} ({GROUP}): must name a subclass of ObjectiveConfig with "
                f"the kind {point.name!r}, which no other objective may have; correct or uninstall the package"
            )
        if taken := RESERVED & set(loaded.metrics):
            raise TypeError(
                f"entry point {point.name} = {point.value} ({GROUP}): metrics may not have the names {sorted(taken)}; "
                "rename these terms"
            )
        kinds[point.name] = loaded
    return kinds


def _with_kind(value: Any) -> Any:
    """Adds the default kind to settings without one, such as `objective: {terms: mlm}`."""
    return {"kind": DEFAULT.kind, **value} if isinstance(value, dict) else value


if TYPE_CHECKING:
    AnyObjectiveConfig = ObjectiveConfig
else:
    KINDS = load_kinds()
    AnyObjectiveConfig = (
        Annotated[Union[tuple(KINDS.values())], Field(discriminator="kind"), BeforeValidator(_with_kind)]  # noqa: UP007
        if len(KINDS) > 1
        else DeclutrConfig
    )
