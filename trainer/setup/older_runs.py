"""Settings of a run as older versions wrote them, so that runs which were started by them keep their hash."""

from typing import Any

# Settings that older runs lack. At these values nothing differs.
_LATER: dict[str, object] = {
    "encoder.new_mlm_head": False,
    "encoder.num_trainable_layers": None,
    "optim.schedule": "slanted_triangular",
    "optim.warmup_fraction": 0.0,
    "validation.data": None,
    "validation.stsb": None,
}
_LATER_OF_BRANCHES: dict[str, object] = {  # of the main one too
    "spans.min_distance_tokens": 0,
    "objective.loss.exclude_same_document": False,
    "objective.mlm_copies": "first",
    "objective.initializer_range": None,
    "objective.masks.shared": False,
    "objective.mixup": 0.0,
}


def as_in_older_runs(found: dict[str, Any]) -> None:
    """Changes the dumped settings of a run: those that changed nothing are removed, others get their earlier value."""
    if found["precision"] == "auto":
        found["precision"] = "fp32"
    if found["encoder"]["compile"] is None:
        found["encoder"]["compile"] = False
    _leave_out(found, _LATER)
    for branch in (found, *found["also"].values()):
        _leave_out(branch, _LATER_OF_BRANCHES)
        if branch["objective"].get("released_rank_scaling", False) is None:
            branch["objective"]["released_rank_scaling"] = False


def _leave_out(found: dict[str, Any], later: dict[str, object]) -> None:
    """Removes settings, by their names with dots, that have these values; those of other objectives are absent."""
    for path, default in later.items():
        *sections, name = path.split(".")
        section: Any = found
        for each in sections:
            section = section.get(each) or {}
        if name in section and section[name] == default:
            del section[name]
