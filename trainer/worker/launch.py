"""The function that Ray Train calls on every worker. The driver sends it, so it imports no torch."""

from typing import Any


def train_loop(settings: dict[str, Any]) -> dict[str, Any] | None:
    """As `trainer.worker.entry.train_loop`."""
    from trainer.worker.entry import train_loop

    return train_loop(settings)
