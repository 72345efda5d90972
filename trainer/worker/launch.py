"""The function that Ray Train calls on every worker. The driver sends it, so it imports no torch."""

from typing import Any


def train_loop(settings: dict[str, Any]) -> dict[str, Any] | None:
    """As `declutr.trainer.worker.entry.train_loop`."""
    from declutr.trainer.worker.entry import train_loop

    return train_loop(settings)
