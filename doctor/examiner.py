"""The part of the doctor that sits on a node: one process, asked again and again."""

import socket
import threading
import time

from doctor import collective, data, exposure, facts, storage

_CONNECT_SECONDS = 5.0


class Examiner:
    """Answers for the node that it runs on. On a cluster it is a Ray actor, one a node."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._door: socket.socket | None = None

    def gather(self) -> tuple[facts.Facts, exposure.Exposure]:
        """Facts of the node."""
        return facts.gather(), exposure.gather()

    def now(self) -> float:
        """The node's clock, seconds since 1970."""
        return time.time()

    def look(self, folder: str) -> data.Seen:
        """The prepared shards, as this node sees them."""
        return data.look(folder)

    def write(self, folder: str, mark: str) -> storage.Written:
        """This node's try at a folder."""
        return storage.write(folder, mark, self.node)

    def seen(self, folder: str, mark: str, nodes: list[str]) -> tuple[list[str], float]:
        """Which nodes' marks are not seen from here."""
        return storage.seen(folder, mark, nodes)

    def clear(self, folder: str, mark: str) -> str:
        """Removes what `write` left; answers why it could not, or nothing."""
        try:
            storage.clear(folder, mark, self.node)
        except (OSError, ValueError, ImportError) as error:
            return str(error)
        return ""

    def open_door(self) -> int:
        """Listens for the other nodes until `close_door`; returns the port."""
        self._door = socket.create_server(("", 0))
        threading.Thread(target=_welcome, args=(self._door,), daemon=True).start()
        port: int = self._door.getsockname()[1]
        return port

    def knock(self, doors: dict[str, tuple[str, int]]) -> dict[str, str]:
        """Connects to other nodes' doors; answers why it could not, by node."""
        shut = {}
        for node, door in doors.items():
            try:
                socket.create_connection(door, timeout=_CONNECT_SECONDS).close()
            except OSError as error:
                shut[node] = str(error)
        return shut

    def close_door(self) -> None:
        """Stops listening."""
        if self._door is not None:
            self._door.close()

    def free_port(self) -> int:
        """A port for others to meet at."""
        return collective.free_port()

    def join(self, address: str, rank: int, size: int, backend: str) -> collective.Summed:
        """Takes part in a sum over the nodes."""
        return collective.join(address, rank, size, backend)


def _welcome(door: socket.socket) -> None:
    while True:
        try:
            door.accept()[0].close()
        except OSError:  # closed
            return
