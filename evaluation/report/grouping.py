"""What the colours of the map stand for: a few groups of sources, however many sources there are."""

import re
from collections import Counter
from collections.abc import Sequence

MAX_GROUPS = 8
"""Colours and shapes that can be told apart."""
OTHERS = "other sources"
_STEP = re.compile(r"[/!]")
"""Between folders, and between an archive and its member."""


class Grouping:
    """Groups of sources by what their names begin with.

    Names are cut after as many steps (`/`, `!`) as leave at most `MAX_GROUPS` different beginnings. Where already the
    first step leaves more, the most frequent ones are groups and all others are one.

    Args:
        sources: of some texts, as they come.
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
        """The most frequent first."""
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def number(self, source: str) -> int:
        """Place of a source's group in `names`; their number for the others, also for sources not seen before."""
        return self._numbers.get(cut(source, self._steps), len(self.names))


def num_steps(source: str) -> int:
    """Steps of a source: folders, and what is in the last one."""
    return len(_STEP.findall(source)) + 1


def cut(source: str, steps: int) -> str:
    """The source up to its step of that number."""
    places = [found.start() for found in _STEP.finditer(source)]
    return source[: places[steps - 1]] if len(places) >= steps else source
