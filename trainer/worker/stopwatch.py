"""Times of the parts of a start, without torch."""

import time


class Stopwatch:
    """Times the consecutive parts of a start, from the command to the first step.

    Args:
        marks: name of each part and its end (Unix time), in order; the first mark is the start. The driver's marks come
            first, then the worker's. The part between them is right only if their clocks agree.
    """

    def __init__(self, marks: dict[str, float]) -> None:
        self.marks = dict(marks)

    def mark(self, name: str) -> None:
        """Ends a part now."""
        self.marks[name] = time.time()

    def parts(self) -> dict[str, float]:
        """Seconds of each part."""
        names, times = list(self.marks), list(self.marks.values())
        return {name: round(end - begin, 2) for name, begin, end in zip(names[1:], times[:-1], times[1:], strict=True)}


def describe_start(step: int, parts: dict[str, float]) -> str:
    """Log line about a start."""
    return f"step {step} after {sum(parts.values()):.1f} s: " + ", ".join(f"{k} {v:.1f}" for k, v in parts.items())
