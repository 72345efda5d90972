"""Entry: `declutr doctor [CONFIG]`. Examines this machine, or every node of a cluster, and names remedies."""

import argparse
import json
import os
import sys
import uuid
from collections.abc import Sequence

import ray

from declutr.common.cluster import cluster_problem
from declutr.common.config import ConfigError, load_config
from declutr.common.session import start_ray
from declutr.doctor import checks, collective, data, facts, network, storage
from declutr.doctor.cluster import Examiners, nodes_of_cluster
from declutr.doctor.facts import Facts
from declutr.doctor.finding import EVERYWHERE, Finding, as_json, as_text, counts, make_finding
from declutr.doctor.needs import Needs, needs_of
from declutr.trainer.driver.checks import problems
from declutr.trainer.setup.config import TrainConfig

_HERE = "here"


def examine(config: TrainConfig | None, address: str | None, paths: Sequence[str]) -> list[Finding]:
    """Collect all findings on this machine, or on the cluster at `address`.

    Args:
        config: config of a planned run, or None.
        address: `auto` or `HOST:PORT`; None: this machine alone, without Ray.
        paths: further folders that a run will write to.
    """
    needs, findings = _of_config(config) if config else (None, [])
    if address is None:
        return [*findings, *_alone(config, needs, paths)]
    if problem := cluster_problem("address", address):
        remedy = "check that Ray runs there (`ray status`), the port is right, and no firewall blocks it"
        return [*findings, make_finding("cluster", EVERYWHERE, problem, fail=True, remedy=remedy)]
    return [*findings, *_cluster(config, needs, address, paths)]


def _of_config(config: TrainConfig) -> tuple[Needs | None, list[Finding]]:
    """Findings about the configuration itself: everything that `train` would refuse before it starts."""
    remedy = "correct the setting; `declutr train` refuses it as well"
    wrong = problems(config)
    found = [make_finding("configuration", EVERYWHERE, problem, fail=True, remedy=remedy) for problem in wrong]
    try:
        needs = needs_of(config)
    except (OSError, ValueError, KeyError, TypeError):  # already among the problems
        return None, found
    words = f"{needs.parameters / 1e6:.1f} million parameters, {needs.checkpoint_bytes / 2**30:.2f} GiB per checkpoint"
    return needs, found or [make_finding("configuration", EVERYWHERE, words)]


def _alone(config: TrainConfig | None, needs: Needs | None, paths: Sequence[str]) -> list[Finding]:
    found, exposed = _gather()
    findings = [*of_facts({_HERE: found}, needs, {}), network.check_ports(_HERE, exposed)]
    if needs:
        findings.append(checks.cpus({_HERE: found.cpus}, needs, own_session=True))
    if config:
        for place in config.places:
            findings += data.check(place, {_HERE: data.look(storage.located(place))})
    for path in _written(config, paths):
        folder, mark = storage.standing(storage.located(path)), _mark()
        try:
            written = {_HERE: storage.write(folder, mark, _HERE)}
            findings += storage.check(path, written, _disk_bytes(config, needs, path))
            if not written[_HERE].error:
                findings.append(storage.check_shared(path, {_HERE: storage.seen(folder, mark, [_HERE])}))
        finally:
            storage.clear(folder, mark, _HERE)
    backend = "nccl" if found.gpus else "gloo"
    return [*findings, collective.check(backend, collective.alone())]


def _cluster(config: TrainConfig | None, needs: Needs | None, address: str, paths: Sequence[str]) -> list[Finding]:
    try:
        start_ray(address=address)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "start Ray (`ray start --head`), or give the address of its head; with tokens, set RAY_AUTH_MODE=token"
        return [make_finding("cluster", EVERYWHERE, f"{address}: {why}", fail=True, remedy=remedy)]
    nodes, findings = nodes_of_cluster()
    examiners = Examiners(nodes)
    try:
        gathered = examiners.ask("facts", lambda _, actor: actor.call.remote(_gather))
        found = {node: both[0] for node, both in gathered.items()}
        findings += of_facts(found, needs, {node.name: node.store_mib for node in nodes})
        for node, (_, exposed) in gathered.items():
            findings += [network.check_ports(node, exposed), network.check_token(node, exposed)]
        findings += [checks.clock(node, *known) for node, known in examiners.clocks().items()]
        if needs:
            findings.append(checks.cpus({node.name: node.cpus for node in nodes}, needs, own_session=False))
        for name in config.places if config else ():
            findings += _shards(examiners, name)
        for path in _written(config, paths):
            findings += _shared(examiners, path, _disk_bytes(config, needs, path))
        findings += [*examiners.reachability(), *examiners.sums()]
        return [*findings, *examiners.findings]
    finally:
        examiners.close()


def _gather() -> tuple[Facts, network.Exposure]:
    return facts.gather(), network.gather()


def _shards(examiners: Examiners, name: str) -> list[Finding]:
    """Let all nodes read the shards of a corpus."""
    place = storage.located(name)
    return data.check(name, examiners.ask("shards", lambda _, actor: actor.call.remote(data.look, place)))


def _shared(examiners: Examiners, path: str, needed_bytes: int) -> list[Finding]:
    """Let all nodes write to one folder, then look for the files of the others."""
    folder, mark = storage.standing(storage.located(path)), _mark()
    try:
        written = examiners.ask("write", lambda node, actor: actor.call.remote(storage.write, folder, mark, node))
        findings = storage.check(path, written, needed_bytes)
        able = [node for node, one in written.items() if not one.error]
        if len(able) == len(written):
            unseen = examiners.ask("see", lambda _, actor: actor.call.remote(storage.seen, folder, mark, able))
            findings.append(storage.check_shared(path, unseen))
        return findings
    finally:
        examiners.ask("clear", lambda node, actor: actor.call.remote(storage.clear, folder, mark, node))


def of_facts(nodes: dict[str, Facts], needs: Needs | None, store_mib: dict[str, int]) -> list[Finding]:
    """Findings from the facts alone, about all nodes and about each."""
    findings = [*checks.versions(nodes), *checks.settings(nodes), *checks.gpus(nodes, needs)]
    for node, one in nodes.items():
        findings.append(checks.memory(node, one, needs, len(nodes)))
        findings.append(checks.object_store(node, one, store_mib.get(node)))
        findings += [checks.open_files(node, one), checks.session_disk(node, one)]
    return findings


def _written(config: TrainConfig | None, paths: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*([config.run] if config else []), *paths]))


def _disk_bytes(config: TrainConfig | None, needs: Needs | None, path: str) -> int:
    return needs.disk_bytes if config and needs and path == config.run else 0


def _mark() -> str:
    return f".declutr-doctor-{uuid.uuid4().hex[:12]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `doctor [CONFIG] [--address ...] [--path ...] [--json]`; return 1 if something must be fixed."""
    parser = argparse.ArgumentParser(prog="declutr doctor", description="Check a machine or cluster before a run.")
    parser.add_argument("config", nargs="?", help="YAML file with the `train` section of the planned run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of that section to change")
    parser.add_argument("--address", help="Ray cluster: auto or HOST:PORT (scaling.address, RAY_ADDRESS, this machine)")
    parser.add_argument("--path", action="append", default=[], help="folder that runs will write to; repeatable")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    given = parser.parse_intermixed_args(argv)
    try:
        config = load_config(given.config, "train", TrainConfig, given.overrides) if given.config is not None else None
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    address = given.address or (config and config.scaling.address) or os.environ.get("RAY_ADDRESS")
    findings = examine(config, None if address == "local" else address, given.path)
    sys.stdout.write(json.dumps(as_json(findings), indent=2) + "\n" if given.json else as_text(findings))
    return int(counts(findings)["FAIL"] > 0)
