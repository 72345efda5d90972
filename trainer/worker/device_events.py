"""Moments on a device's timeline: when it reaches a place in its queue of work."""

import time
from collections.abc import Callable
from typing import Protocol, Self

import torch


class DeviceEvent(Protocol):
    """A place in the device's queue."""

    def reached(self) -> bool:
        """True if the device has done all work before this place; does not wait for it."""

    def wait(self) -> None:
        """Waits until the device has reached this place."""

    def seconds_since(self, earlier: Self) -> float:
        """Seconds between two places that the device has reached."""


class HostEvent:
    """The processor works as it goes: it has reached each place at once."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def reached(self) -> bool:
        """As `DeviceEvent.reached`."""
        return True

    def wait(self) -> None:
        """As `DeviceEvent.wait`."""

    def seconds_since(self, earlier: Self) -> float:
        """As `DeviceEvent.seconds_since`."""
        return self._at - earlier._at


class CudaEvent:
    """A GPU works behind the process that queues its work."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def reached(self) -> bool:
        """As `DeviceEvent.reached`."""
        return bool(self._event.query())

    def wait(self) -> None:
        """As `DeviceEvent.wait`."""
        self._event.synchronize()

    def seconds_since(self, earlier: Self) -> float:
        """As `DeviceEvent.seconds_since`."""
        return float(earlier._event.elapsed_time(self._event)) / 1000


def events_of(device: torch.device) -> Callable[[], DeviceEvent]:
    """A function that marks the present end of the device's queue."""
    return CudaEvent if device.type == "cuda" else HostEvent
