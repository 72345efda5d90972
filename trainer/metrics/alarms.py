"""Alarms: signs in a run's metrics that it learns nothing or will not last, each named once with its remedy.

They read what is on the host anyway, so that a device computes and sends nothing for them.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from declutr.trainer.objectives.config import ObjectiveConfig

_WINDOW = 10  # steps whose mean is compared, because a single batch may be odd
# Uniformity above which all embeddings are nearly equal. A pretrained RoBERTa with mean pooling starts at about -0.1,
# so a collapse is also twice as near to 0 as the lowest mean of the run.
_ONE_POINT = -0.1
_FEW_DIMENSIONS = 0.35  # share of the most dimensions that a run has used; their number differs between encoders
_WAITING, _WAITED_STEPS = 0.5, 20  # mean share of the time that this many steps wait
_FIRST_STEPS = 5  # of a start are not counted: nothing is prefetched yet
_FULL = 0.95  # share of the memory
_REPLAYED = 500  # lines of both ends: the highest spread is early, the windows are the newest


class _Spread:
    """Means of the newest `size` values of one kind of embeddings, and the lowest and highest mean so far."""

    def __init__(self, size: int) -> None:
        self.recent: deque[float] = deque(maxlen=size)
        self.lowest, self.highest = float("inf"), float("-inf")

    def add(self, value: float | None) -> float | None:
        """Adds a value; returns the mean of the newest, None while there are too few."""
        if value is None or value != value:
            return None
        self.recent.append(value)
        if len(self.recent) != self.recent.maxlen:
            return None
        mean = sum(self.recent) / len(self.recent)
        self.lowest, self.highest = min(self.lowest, mean), max(self.highest, mean)
        return mean


class Alarms:
    """Watches the lines of a run's metrics in their order."""

    def __init__(
        self,
        objectives: Mapping[str, ObjectiveConfig],  # settings of the objective of each task by name; "" is the main one
        settings: Mapping[str, Any],  # values of the settings that remedies name, by dotted key
        memory_mib: float = float("inf"),  # memory of the first worker's device, or of its host, in MiB
    ) -> None:
        self._objectives = objectives
        self._settings = settings
        self._past_causes: set[str] = set()
        self._spread: dict[str, _Spread] = {}
        self._memory_mib = memory_mib
        self._waits: deque[float] = deque(maxlen=_WAITED_STEPS)
        self._first_step = 0

    def replay(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Adds the first and the newest of the run's own lines before this start, whose alarms were given then."""
        for line in (*lines[:_REPLAYED], *lines[_REPLAYED:][-_REPLAYED:]):
            self.add(line)
        self._past_causes = {line["alarm"] for line in lines if line["kind"] == "alarm"}

    def add(self, line: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The new alarms that a line gives rise to, as lines: the first of each cause that was not given before.

        A line has the cause (`collapse`, `starving`, `memory` or `non_finite`) as `alarm`, the value beyond the limit
        as `figure`, the `limit`, and as `text` the sign and the remedy.
        """
        if line["kind"] == "start":
            self._first_step = line["step"]
            self._waits.clear()
        alarms, step = list[dict[str, Any]](), line["step"]
        for cause, figure, limit, text in list(self._signs(line)):  # all are read, also of a cause that was given
            if cause not in self._past_causes:
                self._past_causes.add(cause)
                facts = {"alarm": cause, "text": f"step {step}: {text}", "figure": figure, "limit": limit}
                alarms.append({"kind": "alarm", "step": step, **facts})
        return alarms

    def _signs(self, line: Mapping[str, Any]) -> Iterator[tuple[str, float, float, str]]:
        """Cause, figure, limit and text of each sign in a line."""
        if line["kind"] == "validation":
            yield from self._collapse("held-out embeddings", "", line, "uniformity", "effective_rank", 1)
        if line["kind"] != "step":
            return
        for name in self._objectives:
            whose, prefix = (f"the batch of the task {name}", f"{name}_") if name else ("the batch", "")
            names = f"{prefix}batch_uniformity", f"{prefix}batch_participation_ratio"
            yield from self._collapse(whose, name, line, *names, _WINDOW)
        wait = line.get("data_wait_share")
        if wait is not None and line["step"] >= self._first_step + _FIRST_STEPS:
            self._waits.append(wait)
            share = sum(self._waits) / len(self._waits)
            if len(self._waits) == _WAITED_STEPS and share > _WAITING:
                text = (
                    f"starving: the last {_WAITED_STEPS} steps waited for data {share:.0%} of their time (limit "
                    f"{_WAITING:.0%}). Increase {self._now('scaling.data_cpus')}, leave more CPUs of the cluster free, "
                    "or move `data` to a faster disk"
                )
                yield "starving", share, _WAITING, text
        peak, limit = line.get("peak_memory_mib"), _FULL * self._memory_mib
        if peak is not None and peak > limit:
            text = (
                f"memory: the first worker had {peak:,.0f} of {self._memory_mib:,.0f} MiB (limit {_FULL:.0%}), and a "
                f"longer batch may not fit. Lower {self._now('microbatch_tokens')}"
            )
            yield "memory", peak, limit, text
        for name in self._objectives:
            if line.get(f"{name}_skipped" if name else "skipped"):
                text = (
                    f"not finite: the loss or gradient {f'of the task {name} ' if name else ''}is no number, so its "
                    "update was left out (limit of such updates in a row: max_skipped_steps). Lower "
                    f"{self._rate(name)}, or set precision: fp32"
                )
                yield "non_finite", 1.0, 0.0, text

    def _rate(self, task: str) -> str:
        """The learning rate of a task; without its own, the run's trains it."""
        own = f"auxiliary_tasks.{task}.optim.lr"
        return self._now(own if own in self._settings else "optim.lr")

    def _now(self, key: str) -> str:
        return f"{key} (now {self._settings[key]})" if key in self._settings else key

    def _collapse(
        self,
        whose: str,  # the embeddings, in words
        task: str,  # task of these
        line: Mapping[str, Any],  # line of metrics
        evenness: str,  # name of their uniformity in the line
        dimensions: str,  # name of the number of dimensions that they use
        size: int,  # values whose mean is compared
    ) -> Iterator[tuple[str, float, float, str]]:
        """Embeddings near one point, or in few dimensions of those that they had."""
        objective, section = self._objectives[task], f"auxiliary_tasks.{task}." if task else ""
        if not objective.embeds:
            return
        against = objective.against_collapse.replace("objective.", f"{section}objective.")
        lr = self._rate(task)
        remedy = f"{against}, or lower {lr}" if against else f"Lower {lr}"
        own, used = (self._spread.setdefault(name, _Spread(size)) for name in (evenness, dimensions))
        mean = own.add(line.get(evenness))
        if mean is not None and mean > max(_ONE_POINT, own.lowest / 2):
            text = (
                f"collapse: the uniformity of {whose} is {mean:.3f} (limit {_ONE_POINT}; lowest before "
                f"{own.lowest:.2f}), so all embeddings are nearly one point. {remedy}"
            )
            yield "collapse", mean, _ONE_POINT, text
        mean = used.add(line.get(dimensions))
        limit = _FEW_DIMENSIONS * used.highest
        if mean is not None and mean < limit and not objective.forms_classes:
            text = (
                f"collapse: {whose} spans {mean:.1f} dimensions (limit {limit:.1f}, as it had {used.highest:.1f}; "
                f"{dimensions.replace('_', ' ')}). {remedy}"
            )
            yield "collapse", mean, limit, text
