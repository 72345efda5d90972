"""Objectives by the `kind` of their settings: those of this project and those of installed packages."""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args

from pydantic import BeforeValidator, Field

from declutr.trainer.objectives.config import ObjectiveConfig
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.supcon.config import SupconConfig
from declutr.trainer.objectives.text_config import ScdConfig, SclConfig, SimcseConfig

GROUP = "declutr.objectives"  # entry point group: the name is the kind, the value the `ObjectiveConfig` subclass
RESERVED = frozenset({
    "loss", "grad_norm", "lr", "num_selected", "num_tokens", "padding_share", "flops", "skipped", "kind", "step",
    "time", "seconds", "batch_digest", "batch_uniformity", "batch_participation_ratio", "mfu", "peak_memory_mib",
    "data_wait_share", "tokens_per_second", "documents_per_second",
})  # fmt: skip
"""Keys of a line in `metrics.jsonl` that no loss term may have."""
DEFAULT = DeclutrConfig()  # the objective of a configuration that does not name one


def load_kinds() -> tuple[dict[str, type[ObjectiveConfig]], dict[str, str]]:
    """Settings classes by kind, and the problem of each kind whose installed package cannot be used.

    Importing a class must not import torch. A package that cannot be used stops only what names its kind.
    """
    own: tuple[type[ObjectiveConfig], ...] = (DeclutrConfig, SimcseConfig, ScdConfig, SclConfig, SupconConfig)
    kinds = {config.model_fields["kind"].default: config for config in own}
    problems: dict[str, str] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            kinds[point.name] = _load(point, kinds)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a module of the package may raise anything
            package = point.dist.name if point.dist else "of unknown name"
            cause = str(error) if type(error) is TypeError else f"{type(error).__name__}: {error}"
            problems[point.name] = (
                f"package {package}: entry point {point.name} = {point.value} ({GROUP}): {cause}; correct or uninstall "
                "the package"
            )
    return kinds, problems


def _load(point: EntryPoint, kinds: Mapping[str, type[ObjectiveConfig]]) -> type[ObjectiveConfig]:
    """The settings class of an entry point."""
    loaded = point.load()
    if not (isinstance(loaded, type) and issubclass(loaded, ObjectiveConfig)):
        raise TypeError("must name a subclass of ObjectiveConfig")
    loaded.model_rebuild()  # here, where an annotation that cannot be resolved is this package's problem alone
    kind = loaded.model_fields["kind"]
    if kind.default != point.name or get_args(kind.annotation) != (point.name,):
        raise TypeError(f'its class must define `kind: Literal["{point.name}"] = "{point.name}"`')
    if point.name in kinds:
        other = kinds[point.name]
        raise TypeError(f"{other.__module__}:{other.__qualname__} has the kind {point.name!r} already")
    if missing := [name for name in ("implementation", "metrics", "method") if not hasattr(loaded, name)]:
        raise TypeError(f"its class does not define {', '.join(missing)}")
    metrics: Any = loaded.metrics
    if isinstance(metrics, str):
        raise TypeError(f"metrics = {metrics!r} must be a tuple of names")
    if clashes := RESERVED & set(metrics):
        raise TypeError(f"metrics may not have the names {sorted(clashes)}; rename these terms")
    return loaded


def _with_kind(value: Any) -> Any:
    """Adds the default kind to settings without one, such as `objective: {terms: mlm}`; refuses a broken package's."""
    if not isinstance(value, dict):
        return value
    value = {"kind": DEFAULT.kind, **value}
    if isinstance(value["kind"], str) and value["kind"] in BROKEN:
        raise ValueError(BROKEN[value["kind"]])
    return value


KINDS, BROKEN = load_kinds()  # the objectives that can be named, and why others cannot
if TYPE_CHECKING:
    AnyObjectiveConfig = ObjectiveConfig
else:
    AnyObjectiveConfig = Annotated[
        Union[tuple(KINDS.values())],  # noqa: UP007
        Field(discriminator="kind"),
        BeforeValidator(_with_kind),
    ]
