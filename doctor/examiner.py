"""The part of the doctor that runs on a node of a cluster: one Ray actor that answers several questions."""

import socket
import threading
from collections.abc import Callable
from typing import Any

_CONNECT_SECONDS = 5.0


class Examiner:
    """Actor on one node. It calls the functions of the checks there, and keeps a port open between two calls."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function on this node."""
        return function(*arguments)

    def open_door(self) -> int:
        """Listen for the other nodes until `close_door`; return the port."""
        self._door = socket.create_server(("", 0))
        threading.Thread(target=_welcome, args=(self._door,), daemon=True).start()
        port: int = self._door.getsockname()[1]
        return port

    def close_door(self) -> None:
        """Stop listening."""
        self._door.close()


def knock(doors: dict[str, tuple[str, int]]) -> dict[str, str]:
    """Connect to other nodes' ports; return the errors by node."""
    shut = {}
    for node, door in doors.items():
        try:
            socket.create_connection(door, timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            shut[node] = str(error)
    return shut


def _welcome(door: socket.socket) -> None:
    while True:
        try:
            door.accept()[0].close()
        except OSError:  # closed
            return
