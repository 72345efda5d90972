"""Whether the exported encoder is better than the weights at the start of its run, on rows that chose nothing."""

from typing import Any

import numpy as np

from declutr.common.bootstrap import compare
from declutr.trainer.checkpoints.state import RunState
from declutr.trainer.objectives.row_score import statistic_of
from declutr.trainer.setup.config import TrainConfig


def verdict_of(config: TrainConfig, state: RunState) -> dict[str, Any]:
    """The difference between the start of a run and a checkpoint, for the summary, the model card and the last line.

    Returns:
        `sentence`, and with values of both: `score`, `start`, `exported`, `difference`, `rows`, `interval` (95%, or
        None with too few rows) and `measurable`.
    """
    reported = state.reported
    if not config.validation.every_steps:
        return {"sentence": "not validated (validation.every_steps = 0)"}
    if reported is None:
        return {"sentence": "no score of held-out rows tells whether it is better than at the start"}
    if not reported.start or not reported.rows:
        missing = "the start of the run" if not reported.start else f"step {state.step}"
        return {"sentence": f"no verdict: {missing} was not validated"}
    start, rows = np.asarray(reported.start), np.asarray(reported.rows)
    if start.shape != rows.shape:
        return {"sentence": "no verdict: other rows were validated at the start, so validation.data has changed"}
    found = compare(start, rows, config.seed, statistic_of(start))
    return {
        "score": reported.score,
        "start": found.before,
        "exported": found.after,
        "difference": found.difference,
        "rows": found.rows,
        "interval": found.interval,
        "measurable": found.measurable,
        "sentence": f"{reported.score} {found.before:.4f} at the start, {found.after:.4f} exported: {found.sentence()}",
    }
