"""Groups of sources: by folders, as deep as the number of groups allows; single files by their ending."""

from collections import defaultdict

from evaluation.report.grouping import cut, num_steps
from evaluation.report.tally import Tally, total
from pipeline.readers.names import bare_suffix


def group_sources(sources: dict[str, Tally], limit: int) -> dict[str, Tally]:
    """The sources themselves if there are at most `limit`, otherwise sums over common folders.

    The sums are named `folder/ (n files)`, `*.txt (n files)` or as a single file. There are more than `limit` only
    where there are more top folders.
    """
    if len(sources) <= limit:
        return sources
    depths = range(max(map(num_steps, sources)), 0, -1)
    steps = next((steps for steps in depths if len({cut(name, steps) for name in sources}) <= limit), 0)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sources:
        beginning = cut(name, steps or 1)
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
