"""Settings of the held-out scores and of the loggers, and intervals of a run, readable without torch."""

import contextlib
import math
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from declutr.common.config import Strict

STSB = "stsb_spearman"  # the score that `validation.stsb` adds
SICKR = "sickr_spearman"  # the score that `validation.sickr` adds


def _read(value: Any) -> Any:
    """A number of steps as an integer, a share as a float below 1."""
    if isinstance(value, str):  # YAML reads 1e-3 as a text
        with contextlib.suppress(ValueError):
            value = int(value) if value.isdigit() else float(value)
    if isinstance(value, float) and value == 1:
        raise ValueError(
            "may mean every step or the whole run; write 1 for every step, or a share below 1, such as 0.5"
        )
    # `true` of YAML is an int
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not number or (value > 1 and value != int(value)):
        raise ValueError(
            "must be a number of steps, such as 200, or a share of the run's steps below 1, such as 0.05 (20 times)"
        )
    return int(value) if value == 0 or value >= 1 else value


Interval = Annotated[int | float, BeforeValidator(_read)]
"""A number of steps (an integer), or a share of the run's steps (above 0 and below 1)."""


def steps_between(interval: float, total_steps: int) -> int:
    """An interval as a number of steps, for a run of `total_steps`; a share is rounded up to whole steps. 0 is 0."""
    # 0.07 * 100 is 7.000000000000001
    return int(interval) if interval == 0 or interval >= 1 else max(1, math.ceil(total_steps * interval - 1e-9))


def num_validations(interval: float, total_steps: int, done: int) -> int:
    """Number of validations after the one of the start, of a run that has done this many of its steps."""
    every = steps_between(interval, total_steps)
    return -(-done // every) if every else 0


class ValidationConfig(Strict):
    """Validation on held-out documents during training."""

    every_steps: Interval = 0.05
    """Validate every N steps, before the first and after the last. Below 1: a share of the run. 0: never."""
    max_documents: int = Field(default=400, ge=2)
    """Largest number of held-out documents to score."""
    data: str | None = None
    """Other shards (same tokenizer, validation_fraction=0) to score instead of the held-out split of `data`."""
    stsb: str | None = None
    """Folder with STS-B's `sts-dev.csv`. Adds the score `stsb_spearman`."""
    sickr: str | None = None
    """Folder with SICK's `SICK_trial.txt`. Adds the score `sickr_spearman`."""
    score: str = ""
    """Score of the best checkpoint (docs/reference/scores.md); empty: that of `stsb` or `sickr`, else the objective's
    first."""
    patience: int | None = Field(default=None, gt=0)
    """End the run after this many scores in a row that are not better; null: never."""

    @property
    def pairs(self) -> dict[str, str]:
        """Folders of judged pairs by the score that they add, the default of `score` first."""
        return {score: folder for score, folder in ((STSB, self.stsb), (SICKR, self.sickr)) if folder}


class WandbConfig(Strict):
    """Weights & Biases, in addition to TensorBoard.

    It needs `pip install -e '.[wandb]'`. The key is never a setting: log in with `wandb login`, or set WANDB_API_KEY,
    on the host of the first worker.
    """

    mode: Literal["disabled", "offline", "online"] = "disabled"
    """disabled: nothing is written or sent. offline: files in `wandb`, for `wandb sync`. online: metrics, all settings
    and the host's name are sent to `base_url`."""
    base_url: str | None = None
    """Address of the server, such as https://api.wandb.ai, for `mode: online`. No other is opened."""
    project: str = Field(default="declutr-ray", min_length=1)
    """Project of the run."""
    entity: str | None = None
    """Team or user; null: the account's default."""

    @model_validator(mode="after")
    def _has_address(self) -> "WandbConfig":
        if self.mode == "online" and self.base_url is None:
            raise ValueError("mode = online: needs base_url, the server's address, such as https://api.wandb.ai")
        if self.base_url is not None:
            address = urlsplit(self.base_url)
            if address.scheme not in ("http", "https") or not address.hostname:
                raise ValueError(f"base_url = {self.base_url!r}: must be an address like https://api.wandb.ai")
        return self


class MetricsConfig(Strict):
    """Loggers; `metrics.jsonl` is always written, and TensorBoard's files if its package is installed."""

    wandb: WandbConfig = WandbConfig()
