"""The part of the doctor that runs on a node: one process that answers several questions."""

import socket
import threading
import time

from doctor import collective, data, exposure, facts, storage

_CONNECT_SECONDS = 5.0


class Examiner:
    """Source of answers about its node. On a cluster it is a Ray actor, one per node."""

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
        """Prepared shards as this node sees them."""
        return data.look(folder)

    def write(self, folder: str, mark: str) -> storage.Written:
        """Try this node's access to a folder."""
        return storage.write(folder, mark, self.node)

    def seen(self, folder: str, mark: str, nodes: list[str]) -> tuple[list[str], float]:
        """Names of nodes whose marks are not visible from this node."""
        return storage.seen(folder, mark, nodes)

    def clear(self, folder: str, mark: str) -> str:
        """Remove the files of `write`; return the error, or nothing."""
        try:
            storage.clear(folder, mark, self.node)
        except (OSError, ValueError, ImportError) as error:
            return str(error)
        return ""

    def open_door(self) -> int:
        """Listen for the other nodes until `close_door`; return the port."""
        self._door = socket.create_server(("", 0))
        threading.Thread(target=_welcome, args=(self._door,), daemon=True).start()
        port: int = self._door.getsockname()[1]
        return port

    def knock(self, doors: dict[str, tuple[str, int]]) -> dict[str, str]:
        """Connect to other nodes' ports; return the errors by node."""
        shut = {}
        for node, door in doors.items():
            try:
                socket.create_connection(door, timeout=_CONNECT_SECONDS).close()
            except OSError as error:
                shut[node] = str(error)
        return shut

    def close_door(self) -> None:
        """Stop listening."""
        if self._door is not None:
            self._door.close()

    def free_port(self) -> int:
        """Find a port on which a group can meet."""
        return collective.free_port()

    def join(self, address: str, rank: int, size: int, backend: str) -> collective.Summed:
        """Take part in a sum over the nodes."""
        return collective.join(address, rank, size, backend)


def _welcome(door: socket.socket) -> None:
    while True:
        try:
            door.accept()[0].close()
        except OSError:  # closed
            return
