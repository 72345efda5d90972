"""The promise of cluster.yaml, for real: three hosts, `ray up`, `ray submit`, a host that dies, `ray down`."""

import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest
import tinyruns as runs
import yaml
from lab import Lab, missing
from processes import until

from declutr.common.storage import hash_file

ADDRESSES = {"head": "10.77.0.1", "worker1": "10.77.0.2", "worker2": "10.77.0.3", "laptop": "10.77.0.9"}
STEPS, KILLED_AT = 60, 25
CHANGES = {"steps": STEPS, "checkpoint": {"every_steps": 10, "keep_last": 2}, "validation": {"every_steps": 30}}
SCALING = {"num_workers": 2, "cpus_per_worker": 2}

# In place of `pip install`: a virtual environment that sees the packages of this one, and the code that came along.
INSTALL = (
    "{python} -m venv --without-pip ~/venv"
    " && printf '%s\\n' $HOME/declutr/src {packages} > ~/venv/lib/python{version}/site-packages/declutr.pth"
    " && printf '#!/bin/sh\\nexec ~/venv/bin/python -m ray.scripts.scripts \"$@\"\\n' > ~/venv/bin/ray"
    " && chmod +x ~/venv/bin/ray"
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1200)]


def local_copy(cluster):
    """cluster.yaml for hosts that are there already: another provider, addresses, the install and CPUs of a test."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = os.path.realpath(sys.executable)
    changed = {key: value for key, value in cluster.items() if key not in ("available_node_types", "head_node_type")}
    workers = [ADDRESSES["worker1"], ADDRESSES["worker2"]]
    changed["provider"] = {"type": "local", "head_ip": ADDRESSES["head"], "worker_ips": workers}
    changed["max_workers"] = changed["min_workers"] = len(workers)
    changed["auth"] = {"ssh_user": "root", "ssh_private_key": "~/.ssh/id_ed25519"}
    changed["initialization_commands"] = []  # packages of the distribution, and the mount of the shared folder
    install = [line for line in cluster["setup_commands"] if "-m venv" in line or "-m pip" in line]
    changed["setup_commands"] = [INSTALL.format(python=python, packages=site.getsitepackages()[0], version=version)]
    changed["setup_commands"] += [line for line in cluster["setup_commands"] if line not in install]
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        changed[key] = [f"{line} --num-cpus=3" if "ray start" in line else line for line in cluster[key]]
    return changed


@pytest.fixture
def lab(tmp_path, data):
    """Three hosts and a laptop; after the test nothing of them is left, whatever happened in it."""
    if reason := missing():
        pytest.skip(reason)
    lab = Lab(tmp_path / "lab", [runs.ROOT, data.parent, tmp_path])
    with lab:
        for name, address in ADDRESSES.items():
            lab.add(name, address)
        lab.hosts["laptop"].may_connect(lab.key)
        yield lab
    until(lambda: not lab.left(), "the end of all processes", 20)


def test_three_hosts_prepare_and_train_and_survive_one_of_them(lab, data, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    head, laptop = lab.hosts["head"], lab.hosts["laptop"]
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(yaml.safe_dump(local_copy(yaml.safe_load((runs.ROOT / "cluster.yaml").read_text()))))
    corpus = data.parent / "corpus.jsonl"
    sections = {
        "prepare": runs.prepare_values(corpus, shared / "data", session={"address": "auto"}),
        "train": runs.train_values(
            shared / "data", shared / "run", **CHANGES, scaling=SCALING | {"address": "auto", "max_failures": 1}
        ),
    }
    runs.write_config(shared / "tiny.yaml", **sections)

    def ray(*command, **options):
        done = laptop.run("ray", *command, folder=runs.ROOT, env={"RAY_UP_enable_autoscaler_v2": "0"}, **options)
        assert done.returncode == 0, done.stdout

    ray("get-auth-token", "--generate")
    ray("up", "-y", cluster)
    # Nothing but SSH and Ray's own ports answers, and the dashboard only to its own host.
    listening = [line.split()[3] for line in head.run("ss", "-Hltn").stdout.splitlines()]
    assert [address for address in listening if address.endswith(":8265")] == ["127.0.0.1:8265"]

    ray("submit", cluster, runs.ROOT / "pipeline" / "prepare.py", "--", shared / "tiny.yaml")
    for shard in sorted(data.glob("*.arrow")):
        assert (shared / "data" / shard.name).read_bytes() == shard.read_bytes()

    # The token decides who may speak with the cluster.
    status = ["ray", "status", "--address", f"{ADDRESSES['head']}:6379"]
    admitted = laptop.run(*status, env={"RAY_AUTH_MODE": "token"})
    assert admitted.returncode == 0, admitted.stdout
    for environment in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        refused = laptop.run(*status, env=environment)
        assert refused.returncode != 0
        assert "InvalidAuthToken" in refused.stdout, refused.stdout

    # A host dies in the middle.
    submit = ("ray", "submit", str(cluster), str(runs.ROOT / "trainer" / "train.py"), "--", str(shared / "tiny.yaml"))
    shown = tmp_path / "train.log"
    with shown.open("w") as log:
        training = subprocess.Popen(
            laptop.command(*submit, folder=runs.ROOT), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        runs.wait_for_step(training, None, shared / "run", KILLED_AT, 400)
        workers = [lab.hosts["worker1"], lab.hosts["worker2"]]
        trains = [host for host in workers if any("RayTrainWorker" in title for title in host.titles())]
        trains[0].kill()
        assert training.wait(timeout=600) == 0, shown.read_text()
    ray("down", "-y", cluster)
    same_as_on_one_machine(shared / "run", data, tmp_path)


def same_as_on_one_machine(run, data, tmp_path):
    """The same batches, the same losses, and, as the world had the same size all the time, the same bits."""
    values = runs.train_values(data, tmp_path / "alone", **CHANGES, scaling=SCALING)
    done = runs.run_command(
        "declutr.trainer.train", runs.write_config(tmp_path / "alone.yaml", train=values), timeout=600
    )
    assert done.returncode == 0, done.stderr
    here, there = runs.steps_of(tmp_path / "alone"), runs.steps_of(run)
    assert len(there) == STEPS
    assert here == there
    exported = [hash_file(folder / "export" / "model.safetensors") for folder in (tmp_path / "alone", run)]
    assert exported[0] == exported[1]
    assert json.loads((Path(run) / "summary.json").read_text())["steps"] == STEPS
