"""Divides any number of sources into a few groups: by the beginnings of their names, or by folders."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from declutr.evaluation.report.tally import Tally, total
from declutr.pipeline.readers.corpus import bare_suffix

MAX_GROUPS = 8
"""Number of colours and shapes that a reader can distinguish."""
OTHERS = "other sources"
_STEP = re.compile(r"[/!]")
"""Separators of folders, and of an archive and its member."""


class Grouping:
    """Groups sources by the beginnings of their names, one group for each colour of the map.

    Names are cut at a separator (`/`, `!`), as late as possible with at most `MAX_GROUPS` different beginnings. If the
    cut at the first separator already gives more, the most frequent beginnings are groups and the others share one.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        self._steps = 1
        beginnings = Counter(_cut(source, 1) for source in sources)
        for steps in range(2, max((_num_steps(source) for source in sources), default=1) + 1):
            finer = Counter(_cut(source, steps) for source in sources)
            if len(finer) > MAX_GROUPS:
                break
            self._steps, beginnings = steps, finer
        ranked = sorted(beginnings.items(), key=lambda item: (-item[1], item[0]))
        self.names = [name for name, _ in ranked[:MAX_GROUPS]]
        """Names of the groups, the most frequent first."""
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def number(self, source: str) -> int:
        """Index of a source's group in `names`; `len(names)` for all other sources, also unknown ones."""
        return self._numbers.get(_cut(source, self._steps), len(self.names))


def group_sources(sources: dict[str, Tally], limit: int) -> dict[str, Tally]:
    """The sources themselves if there are at most `limit`, otherwise sums over common folders.

    The sums are named `folder/ (n files)`, `*.txt (n files)` or as a single file. There are more than `limit` only
    where there are more top folders.
    """
    if len(sources) <= limit:
        return sources
    depths = range(max(map(_num_steps, sources)), 0, -1)
    steps = next((steps for steps in depths if len({_cut(name, steps) for name in sources}) <= limit), 0)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sources:
        beginning = _cut(name, steps or 1)
        if beginning != name:
            beginning += "/"
        elif not steps:
            beginning = f"*{bare_suffix(name)}"
        groups[beginning].append(name)
    found: dict[str, Tally] = {}
    for beginning, names in groups.items():
        alone = len(names) == 1 and not beginning.endswith("/")
        found[names[0] if alone else f"{beginning} ({len(names):,} file{'s' * (len(names) > 1)})"] = total(
            sources[name] for name in names
        )
    return found


def _num_steps(source: str) -> int:
    """Steps of a source: its folders and its last name."""
    return len(_STEP.findall(source)) + 1


def _cut(source: str, steps: int) -> str:
    """The source up to its step of this number."""
    places = [found.start() for found in _STEP.finditer(source)]
    return source[: places[steps - 1]] if len(places) >= steps else source
