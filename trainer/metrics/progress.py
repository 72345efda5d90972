"""The driver's progress bar, which shows the run's newest metrics."""

from collections.abc import Callable, Sequence
from typing import Any

from declutr.common.console.logs import bar
from declutr.common.watcher import Watcher

_EVERY_SECONDS = 0.5


class ProgressBar(Watcher):
    """Shows step, losses (`terms`), speed, padding, data-wait and ETA while its block runs.

    Args:
        newest: returns the newest step's line of metrics; None before the first.
        steps: optimizer steps of the whole run.
        terms: names of the loss terms.
        rows: short noun for rows of the shards.
        done: steps of earlier starts.
    """

    def __init__(
        self, newest: Callable[[], dict[str, Any] | None], steps: int, terms: Sequence[str], rows: str, done: int
    ) -> None:
        super().__init__(_EVERY_SECONDS, "declutr-progress")
        self.newest = newest
        self.terms = terms
        self.rows = rows
        self.bar = bar(total=steps, unit="step", desc="train")
        self.bar.n = self.bar.initial = done
        self._waiting = True

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.look()
        self.bar.close()

    def look(self) -> None:
        """Shows the newest step."""
        line = self.newest()
        if line is None or line["step"] == self.bar.n:
            return
        if self._waiting or line["step"] < self.bar.n:  # count the rate from here
            self._waiting = False
            self.bar.initial = line["step"]
            self.bar.unpause()
        self.bar.n = line["step"]
        if line.get("skipped") or line["loss"] is None:  # of the step, or of an auxiliary task's own update
            self.bar.set_postfix_str("loss not finite, skipped")
            return
        self.bar.set_postfix_str(
            f"loss {line['loss']:.3f} ({' '.join(f'{name} {line[name]:.3f}' for name in self.terms)}) "
            f"{line['documents_per_second']:.0f} {self.rows}/s {line['tokens_per_second'] / 1000:.1f}k tok/s "
            f"padding {line['padding_share']:.1%} data-wait {line['data_wait_share']:.1%}"
            + ("" if line["mfu"] is None else f" MFU {line['mfu']:.1%}")
        )
