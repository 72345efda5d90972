"""Alarms: signs in a run's metrics that it learns nothing or will not last, each named once with its remedy.

They read what is on the host anyway, so that a device computes and sends nothing for them.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from declutr.trainer.objectives.config import ObjectiveConfig

_WINDOW = 10  # steps whose mean is compared, because a single batch may be odd
_ONE_POINT = -0.1  # uniformity above which all embeddings are nearly equal
_FEW_DIMENSIONS = 0.35  # share of the most dimensions that a run has used
_WAITING, _WAITED_STEPS, _FIRST_STEPS = 0.5, 20, 5
_FULL = 0.95  # share of the memory
_REPLAYED = 500


@dataclass(frozen=True)
class Alarm:
    """An alarm.

    Attributes:
        cause: `collapse`, `starving`, `memory` or `non_finite`.
        step: step at which it was found.
        figure: the value that is beyond the limit.
        limit: the limit.
        text: one sentence or two: what was found, and the remedy.
    """

    cause: str
    step: int
    figure: float
    limit: float
    text: str

    def line(self) -> dict[str, Any]:
        """The alarm as a line of metrics."""
        text = f"step {self.step}: {self.text}"
        return {"alarm": self.cause, "text": text, "figure": self.figure, "limit": self.limit}


@dataclass
class _Spread:
    """The spread of one kind of embeddings so far.

    Attributes:
        size: values whose mean is compared.
        recent: the newest values.
        lowest: lowest mean so far.
        highest: highest mean so far.
    """

    size: int
    recent: deque[float] = field(default_factory=deque)
    lowest: float = float("inf")
    highest: float = float("-inf")

    def add(self, value: float | None) -> float | None:
        """Adds a value; returns the mean of the newest, None while there are too few."""
        if value is None or value != value:
            return None
        self.recent.append(value)
        if len(self.recent) > self.size:
            self.recent.popleft()
        if len(self.recent) < self.size:
            return None
        mean = sum(self.recent) / self.size
        self.lowest, self.highest = min(self.lowest, mean), max(self.highest, mean)
        return mean


class Alarms:
    """Watches the lines of a run's metrics in their order.

    Args:
        objectives: settings of the objective of each task by name; "" is the main one.
        settings: values of the settings that remedies name, by dotted key.
        memory_mib: memory of the first worker's device, or of its host, in MiB.
    """

    def __init__(
        self, objectives: Mapping[str, ObjectiveConfig], settings: Mapping[str, Any], memory_mib: float = float("inf")
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

    def add(self, line: Mapping[str, Any]) -> list[Alarm]:
        """The new alarms that a line gives rise to."""
        step, kind = line["step"], line["kind"]
        if kind == "start":
            self._first_step = step
            self._waits.clear()
        alarms = list[Alarm]()
        if kind == "validation" and self._objectives[""].embeds:
            alarms += self._collapse("held-out embeddings", "", line, "uniformity", "effective_rank", 1)
        if kind == "step":
            for name, objective in self._objectives.items():
                prefix = f"{name}_" if name else ""
                whose = f"the batch of the task {name}" if name else "the batch"
                names = f"{prefix}batch_uniformity", f"{prefix}batch_participation_ratio"
                if objective.embeds:
                    alarms += self._collapse(whose, name, line, *names, _WINDOW)
            alarms += [*self._starving(line), *self._memory(line), *self._non_finite(line)]
        return self._new(alarms)

    def _new(self, alarms: list[Alarm]) -> list[Alarm]:
        """The first alarm of each cause that was not given before."""
        new = {alarm.cause: alarm for alarm in reversed(alarms) if alarm.cause not in self._past_causes}
        self._past_causes |= new.keys()
        return list(new.values())

    def _now(self, key: str) -> str:
        return f"{key} (now {self._settings[key]})" if key in self._settings else key

    def _collapse(
        self, whose: str, task: str, line: Mapping[str, Any], evenness: str, dimensions: str, size: int
    ) -> Iterator[Alarm]:
        """Embeddings near one point, or in few dimensions of those that they had."""
        own = self._spread.setdefault(evenness, _Spread(size))
        mean = own.add(line.get(evenness))
        objective, section = self._objectives[task], f"auxiliary_tasks.{task}." if task else ""
        against = objective.against_collapse.replace("objective.", f"{section}objective.")
        own_lr = f"{section}optim.lr"
        lr = self._now(own_lr if own_lr in self._settings else "optim.lr")  # without its own, the run's trains the task
        remedy = f"{against}, or lower {lr}" if against else f"Lower {lr}"
        if mean is not None and mean > max(_ONE_POINT, own.lowest / 2):
            yield Alarm(
                "collapse",
                line["step"],
                mean,
                _ONE_POINT,
                f"collapse: the uniformity of {whose} is {mean:.3f} (limit {_ONE_POINT}; lowest before "
                f"{own.lowest:.2f}), so all embeddings are nearly one point. {remedy}",
            )
        used = self._spread.setdefault(dimensions, _Spread(size))
        mean = used.add(line.get(dimensions))
        limit = _FEW_DIMENSIONS * used.highest
        if mean is not None and mean < limit and not objective.forms_classes:
            yield Alarm(
                "collapse",
                line["step"],
                mean,
                limit,
                f"collapse: {whose} spans {mean:.1f} dimensions (limit {limit:.1f}, as it had {used.highest:.1f}; "
                f"{dimensions.replace('_', ' ')}). {remedy}",
            )

    def _non_finite(self, line: Mapping[str, Any]) -> Iterator[Alarm]:
        """A step of which an update was left out."""
        for name in self._objectives:
            if line.get(f"{name}_skipped" if name else "skipped"):
                whose = f"of the task {name} " if name else ""
                yield Alarm(
                    "non_finite",
                    line["step"],
                    1.0,
                    0.0,
                    f"not finite: the loss or gradient {whose}is no number, so its update was left out (limit of such "
                    f"updates in a row: max_skipped_steps). Lower {self._now('optim.lr')}, or set precision: fp32",
                )

    def _memory(self, line: Mapping[str, Any]) -> Iterator[Alarm]:
        """A worker that has nearly all memory of its device."""
        peak, limit = line.get("peak_memory_mib"), _FULL * self._memory_mib
        if peak is not None and peak > limit:
            yield Alarm(
                "memory",
                line["step"],
                peak,
                limit,
                f"memory: the first worker had {peak:,.0f} of {self._memory_mib:,.0f} MiB (limit {_FULL:.0%}), and a "
                f"longer batch may not fit. Lower {self._now('microbatch_tokens')}",
            )

    def _starving(self, line: Mapping[str, Any]) -> Iterator[Alarm]:
        """Steps that mostly wait for data."""
        wait = line.get("data_wait_share")
        if wait is None or line["step"] < self._first_step + _FIRST_STEPS:
            return
        self._waits.append(wait)
        share = sum(self._waits) / len(self._waits)
        if len(self._waits) == _WAITED_STEPS and share > _WAITING:
            yield Alarm(
                "starving",
                line["step"],
                share,
                _WAITING,
                f"starving: the last {_WAITED_STEPS} steps waited for data {share:.0%} of their time (limit "
                f"{_WAITING:.0%}). Increase {self._now('scaling.data_cpus')}, leave more CPUs of the cluster free, or "
                "move `data` to a faster disk",
            )
