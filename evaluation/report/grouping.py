"""Divides any number of sources into a few groups, one for each colour of the map."""

import re
from collections import Counter
from collections.abc import Sequence

MAX_GROUPS = 8
"""Number of colours and shapes that a reader can distinguish."""
OTHERS = "other sources"
_STEP = re.compile(r"[/!]")
"""Separators of folders, and of an archive and its member."""


class Grouping:
    """Groups sources by the beginnings of their names.

    Names are cut at a separator (`/`, `!`), as late as possible with at most `MAX_GROUPS` different beginnings. If the
    cut at the first separator already gives more, the most frequent beginnings are groups and the others share one.

    Args:
        sources: source of each text, with repetitions.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        self._steps = 1
        beginnings = Counter(cut(source, 1) for source in sources)
        for steps in range(2, max((num_steps(source) for source in sources), default=1) + 1):
            finer = Counter(cut(source, steps) for source in sources)
            if len(finer) > MAX_GROUPS:
                break
            self._steps, beginnings = steps, finer
        ranked = sorted(beginnings.items(), key=lambda item: (-item[1], item[0]))
        self.names = [name for name, _ in ranked[:MAX_GROUPS]]
        """Names of the groups, the most frequent first."""
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def number(self, source: str) -> int:
        """Index of a source's group in `names`; `len(names)` for all other sources, also unknown ones."""
        return self._numbers.get(cut(source, self._steps), len(self.names))


def num_steps(source: str) -> int:
    """Steps of a source: its folders and its last name."""
    return len(_STEP.findall(source)) + 1


def cut(source: str, steps: int) -> str:
    """The source up to its step of this number."""
    places = [found.start() for found in _STEP.finditer(source)]
    return source[: places[steps - 1]] if len(places) >= steps else source
