"""Examiners on every node of a Ray cluster, and their combined findings."""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from declutr.doctor import collective
from declutr.doctor.finding import EVERYWHERE, Finding, make_finding

ANSWER_SECONDS = 60.0
_CLOCK_ROUNDS = 5
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Node:
    """Living node of Ray's list, with the resources that Ray manages there."""

    name: str
    id: str
    address: str
    cpus: float
    gpus: float
    store_mib: int


def nodes_of_cluster() -> tuple[list[Node], list[Finding]]:
    """List living nodes, and make a finding about dead ones."""
    listed = ray.nodes()
    living = [one for one in listed if one["Alive"]]
    addresses = [one["NodeManagerAddress"] for one in living]
    nodes = [
        Node(
            name=address if addresses.count(address) == 1 else f"{address}/{one['NodeID'][:6]}",
            id=one["NodeID"],
            address=address,
            cpus=one["Resources"].get("CPU", 0.0),
            gpus=one["Resources"].get("GPU", 0.0),
            store_mib=int(one["Resources"].get("object_store_memory", 0)) >> 20,
        )
        for one, address in zip(living, addresses, strict=True)
    ]
    dead = sorted({one["NodeManagerAddress"] for one in listed if not one["Alive"]})
    remedy = "expected after a planned stop; otherwise read the node's raylet.err and start Ray there again"
    limit = f"{len(dead)} dead: {', '.join(dead)}" if dead else ""
    return nodes, [
        make_finding("nodes", EVERYWHERE, f"{len(nodes)} alive", limit=limit, warn=bool(dead), remedy=remedy)
    ]


class Examiner:
    """Actor on one node. It calls the functions of the checks there, and keeps a port open between two calls."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function on this node."""
        return function(*arguments)

    def listen(self) -> int:
        """Listen for the other nodes until `stop_listening`; return the port."""
        self._socket = socket.create_server(("", 0))
        threading.Thread(target=_accept_all, args=(self._socket,), daemon=True).start()
        port: int = self._socket.getsockname()[1]
        return port

    def stop_listening(self) -> None:
        """Stop listening."""
        self._socket.close()


def probe(addresses: dict[str, tuple[str, int]]) -> dict[str, str]:
    """Connect to other nodes' ports; return the errors by node."""
    shut = {}
    for node, address in addresses.items():
        try:
            socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            shut[node] = str(error)
    return shut


def _accept_all(listening: socket.socket) -> None:
    while True:
        try:
            listening.accept()[0].close()
        except OSError:  # closed
            return


class Examiners:
    """One examiner per node; a node that does not answer in time is reported once and not asked again."""

    def __init__(self, nodes: list[Node], seconds: float = ANSWER_SECONDS) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.seconds = seconds
        self.findings: list[Finding] = []
        self._actors = {node.name: _place(node, gpus=0) for node in nodes}

    def names(self) -> list[str]:
        """Nodes that have answered so far."""
        return list(self._actors)

    def ask(self, what: str, call: Callable[[str, Any], Any]) -> dict[str, Any]:
        """Ask all nodes at once; return the answers by node."""
        asked = {node: call(node, actor) for node, actor in self._actors.items()}
        answers = self._wait(what, asked)
        for node in set(asked) - set(answers):
            ray.kill(self._actors.pop(node))
        return {node: answers[node] for node in asked if node in answers}

    def _wait(self, what: str, asked: dict[str, Any]) -> dict[str, Any]:
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=self.seconds) if asked else ([], [])
        answers = {}
        for node, reference in asked.items():
            why = f"no answer in {self.seconds:.0f} s"
            if reference in ready:
                try:
                    answers[node] = ray.get(reference)
                    continue
                except ray.exceptions.RayError as error:
                    why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            remedy = "read the node's logs (`ray logs`); check the installed project and the free disk space"
            self.findings.append(make_finding(f"answers ({what})", node, why, fail=True, remedy=remedy))
        return answers

    def clocks(self) -> dict[str, tuple[float, float]]:
        """Offset of each node's clock from this process's, and its uncertainty: half the quickest call."""
        found = {}
        for node in self.names():
            rounds = []
            for _ in range(_CLOCK_ROUNDS):
                sent = time.time()
                answer = self._wait("clock", {node: self._actors[node].call.remote(time.time)})
                if not answer:
                    ray.kill(self._actors.pop(node))
                    break
                back = time.time()
                rounds.append(((back - sent) / 2, answer[node] - (sent + back) / 2))
            if rounds and node in self._actors:
                half, offset = min(rounds)
                found[node] = (offset, half)
        return found

    def reachability(self) -> list[Finding]:
        """Check that every node can connect to every other."""
        if len(self._actors) < 2:
            return []
        ports = self.ask("open a port", lambda _, actor: actor.listen.remote())
        addresses = {node: (self.nodes[node].address, port) for node, port in ports.items()}
        shut = self.ask("connect", lambda _, actor: actor.call.remote(probe, addresses))
        self.ask("close the port", lambda _, actor: actor.stop_listening.remote())
        blocked = [f"{node} to {other} ({why})" for node, found in shut.items() for other, why in found.items()]
        return [
            make_finding(
                "nodes reach each other", EVERYWHERE, "; ".join(blocked) or f"{len(shut)} nodes, any port",
                fail=bool(blocked), remedy="allow all TCP ports between the nodes in the firewall or security group",
            )
        ]  # fmt: skip

    def sums(self) -> list[Finding]:
        """Check an all-reduce over one process per node: by gloo, and by NCCL if every node has a free GPU."""
        findings = [self._sum("gloo", self._actors)] if len(self._actors) > 1 else []
        if self._actors and all(self.nodes[node].gpus >= 1 for node in self._actors):
            holders = {node: _place(self.nodes[node], gpus=1) for node in self._actors}
            findings.append(self._sum("nccl", holders))
            for actor in holders.values():
                ray.kill(actor)
        return findings

    def _sum(self, backend: str, actors: dict[str, Any]) -> Finding:
        first = next(iter(actors))
        asked = {first: actors[first].call.remote(collective.free_port)}
        port = self._wait("a port for the group", asked).get(first)
        address = f"tcp://{self.nodes[first].address}:{port}"
        size = len(actors)
        asked = {
            node: actor.call.remote(collective.join, address, rank, size, backend, self.nodes[node].address)
            for rank, (node, actor) in enumerate(actors.items())
        }
        found = self._wait(f"all-reduce by {backend}", asked) if port else {}
        return collective.check(
            backend, {node: found.get(node, collective.Summed(error="no answer")) for node in actors}
        )

    def close(self) -> None:
        """Stop the examiners."""
        for actor in self._actors.values():
            ray.kill(actor)


def _place(node: Node, gpus: int) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
    return ray.remote(Examiner).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy).remote()
