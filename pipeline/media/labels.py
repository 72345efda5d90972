"""Labels of images and clips: stored with them, or from the path of their file."""

import re
from functools import lru_cache

from declutr.pipeline.readers.corpus import Blob
from declutr.pipeline.shards.content import FOLDER, PARENT_FOLDER, LabelRule

NO_LABEL = "no_label"
"""Failure reason of an image or clip without a label."""
MAX_CHARACTERS = 255
"""Longest label."""


class LabelError(ValueError):
    """An image or clip has no usable label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def label_of(blob: Blob, rule: LabelRule) -> str:
    """The label of an image or clip; "" without labels.

    A label stored with it comes before the rule.

    Raises:
        LabelError: it has none, or a very long one.
    """
    if rule is None:
        return ""
    label = blob.label if blob.label is not None else _from_path(blob.source, rule)
    if not label:
        places = {FOLDER: "is in no folder", PARENT_FOLDER: "has no folder above its folder"}
        where = places.get(rule, f"does not match content.label = {rule!r}")
        raise LabelError(NO_LABEL, f"its path {where}, and no label is stored with it; content.label=null needs none")
    if len(label) > MAX_CHARACTERS:
        raise LabelError("bad_label", f"a label of {len(label)} characters, at most {MAX_CHARACTERS} are possible")
    return label


def _from_path(source: str, rule: str) -> str | None:
    """The label in a path relative to the corpus."""
    if rule in (FOLDER, PARENT_FOLDER):
        # In an archive, the folders around the archive are not those of the member.
        names, level = source.rpartition("!")[2].split("/"), 2 if rule == FOLDER else 3
        return names[-level] if len(names) >= level else None
    found = _compiled(rule).search(source)
    return found[1] if found else None


@lru_cache(maxsize=4)
def _compiled(rule: str) -> re.Pattern[str]:
    return re.compile(rule)
