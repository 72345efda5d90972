"""Hosts in namespaces: cluster.yaml with `ray up`, `ray submit`, a host that dies, `ray down`; deploy/slurm.sbatch.

Ray is real; srun and scontrol are stand-ins, and the test is Slurm.
"""

import json
import os
import signal
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
NODES = {"node1": "10.79.0.1", "node2": "10.79.0.2"}
STEPS, KILLED_AT = 60, 25
CHANGES = {
    "steps": STEPS,
    "precision": "fp32",
    "checkpoint": {"every_steps": 10, "keep_last": 2},
    "validation": {"every_steps": 30},
}
JOB, JOB_STEPS, STOPPED_AT = 701, 400, 10  # a stop takes a second or two, this many steps several
SCALING = {"num_workers": 2, "cpus_per_worker": 2}

# In place of `pip install`: a virtual environment that sees the packages of this one, and the code that came along.
INSTALL = (
    "{python} -m venv --without-pip ~/venv"
    " && printf '%s\\n' $HOME/declutr/src {packages} > ~/venv/lib/python{version}/site-packages/declutr.pth"
    " && printf '#!/bin/sh\\nexec ~/venv/bin/python -m ray.scripts.scripts \"$@\"\\n' > ~/venv/bin/ray"
    " && chmod +x ~/venv/bin/ray"
)

# A step on the nodes of --nodelist, over SSH, with the environment of the job. SIGTERM goes to all processes of a task.
SRUN = """#!{python}
import os, shlex, signal, subprocess, sys
start = next(place for place, one in enumerate(sys.argv[1:], 1) if not one.startswith("--"))
options, command = sys.argv[1:start], sys.argv[start:]
(nodes,) = [one.partition("=")[2].split(",") for one in options if one.startswith("--nodelist=")]
ssh = ["ssh", "-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR"]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
tasks = []
for node in nodes:
    name = f"/tmp/task-{{os.environ['SLURM_JOB_ID']}}-{{os.getpid()}}"
    environment = shlex.join(["env", "-i", *(f"{{key}}={{value}}" for key, value in os.environ.items())])
    task = f"echo $$ > {{name}}; exec {{environment}} {{shlex.join(command)}}"
    line = f"setsid --wait bash -c {{shlex.quote(task)}}"
    tasks.append((node, name, subprocess.Popen([*ssh, node, line], stdin=subprocess.DEVNULL)))
signal.signal(signal.SIGCHLD, lambda *_: None)
while any(task.poll() is None for _, _, task in tasks):
    if (found := signal.sigtimedwait([signal.SIGTERM], 0.2)) is not None:
        for node, name, _ in tasks:
            subprocess.run([*ssh, node, f"kill -TERM -- -$(cat {{name}})"])
sys.exit(max(abs(task.returncode) for _, _, task in tasks))
"""
SCONTROL = """#!/bin/sh
case "$1 $2" in
  "show hostnames") echo "$3" | tr , '\\n' ;;
  "requeue $SLURM_JOB_ID") echo "$2" >> {requeued} ;;
  *) echo "scontrol $*" >&2; exit 1 ;;
esac
"""

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.cluster]


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
def possible():
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture
def lab(possible, tmp_path, data):  # noqa: ARG001
    """Three hosts and a laptop; after the test nothing of them is left, whatever happened in it."""
    lab = Lab(tmp_path / "lab", [runs.ROOT, data.parent, tmp_path])
    with lab:
        for name, address in ADDRESSES.items():
            lab.add(name, address)
        lab.hosts["laptop"].may_connect(lab.key)
        yield lab
    until(lambda: not lab.left(), "the end of all processes", 20)


@pytest.mark.timeout(1200)
def test_three_hosts_prepare_and_train_and_survive_one_of_them(lab, data, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    laptop = lab.hosts["laptop"]
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(yaml.safe_dump(local_copy(yaml.safe_load((runs.ROOT / "cluster.yaml").read_text()))))
    prepare = runs.prepare_values(data.parent / "corpus.jsonl", shared / "data", session={"address": "auto"})
    scaling = SCALING | {"address": "auto", "max_failures": 1}
    train = runs.train_values(shared / "data", shared / "run", **CHANGES, scaling=scaling)
    runs.write_config(shared / "tiny.yaml", prepare=prepare, train=train)

    def ray(*command, **options):
        done = laptop.run("ray", *command, folder=runs.ROOT, env={"RAY_UP_enable_autoscaler_v2": "0"}, **options)
        assert done.returncode == 0, done.stdout

    ray("get-auth-token", "--generate")
    ray("up", "-y", cluster)
    # Nothing but SSH and Ray's own ports answers, and the dashboard only to its own host.
    listening = [line.split()[3] for line in lab.hosts["head"].run("ss", "-Hltn").stdout.splitlines()]
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
    words = "ray", "submit", cluster, runs.ROOT / "trainer" / "train.py", "--", shared / "tiny.yaml"
    submit, output = laptop.command(*words, folder=runs.ROOT), tmp_path / "train.log"
    with output.open("w") as log:
        training = subprocess.Popen(submit, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        runs.wait_for_step(training, None, shared / "run", KILLED_AT, 400)
        workers = [lab.hosts["worker1"], lab.hosts["worker2"]]
        next(host for host in workers if any("RayTrainWorker" in title for title in host.titles())).kill()
        assert training.wait(timeout=600) == 0, output.read_text()
    ray("down", "-y", cluster)

    # On one machine: the same batches, losses, and, as the world had the same size all the time, bits.
    run, alone = shared / "run", tmp_path / "alone"
    values = runs.train_values(data, alone, **CHANGES, scaling=SCALING)
    config = runs.write_config(tmp_path / "alone.yaml", train=values)
    done = runs.run_command("declutr.trainer.train", config, timeout=600)
    assert done.returncode == 0, done.stderr
    assert len(runs.steps_of(run)) == STEPS
    assert_same_bits(run, alone)
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS


def assert_same_bits(run, other):
    assert runs.steps_of(run) == runs.steps_of(other)
    exported = [hash_file(folder / "export" / "model.safetensors") for folder in (run, other)]
    assert exported[0] == exported[1]


class Slurm:
    """Starts the script as a batch job on the first node; the tasks of an array share both nodes."""

    def __init__(self, folder, data):
        self.folder = folder
        self.requeued = folder / "requeued"
        tools = folder / "bin"
        tools.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (tools / name).write_text(text.format(python=sys.executable, requeued=self.requeued))
            (tools / name).chmod(0o755)
        self.lab = Lab(folder / "lab", [runs.ROOT, data.parent, folder])

    def batch(self, task, restarts, *arguments):
        """The process of the batch shell's parent, and the job's log."""
        job = {"SLURM_JOB_ID": JOB + task, "SLURM_ARRAY_TASK_ID": task, "SLURM_RESTART_COUNT": restarts}
        allocation = {"SLURM_JOB_NODELIST": "node1,node2", "SLURM_JOB_NUM_NODES": 2, "SLURM_CPUS_ON_NODE": 2}
        more = {"SLURM_JOB_NAME": "tiny", "SLURM_SUBMIT_DIR": self.folder, "SLURM_MEM_PER_NODE": 2000}
        path = f"{self.folder}/bin:{sys.prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        words, env = ("bash", runs.ROOT / "deploy/slurm.sbatch"), {**job, **allocation, **more, "PATH": path}
        command = self.lab.hosts["node1"].command(*words, *arguments, env=env, folder=self.folder)
        with (self.folder / f"tiny-{task}.log").open("a") as log:  # --open-mode=append
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def log(self, task):
        return (self.folder / f"tiny-{task}.log").read_text()

    def folders(self):
        """Folders of jobs that are on the nodes now; Slurm itself ends what still runs when the script has ended."""
        return [str(path) for host in self.lab.hosts.values() for path in (host.folder / "tmp").glob("declutr-[0-9]*")]


@pytest.fixture
def slurm(possible, tmp_path, data):  # noqa: ARG001
    slurm = Slurm(tmp_path, data)
    with slurm.lab as lab:
        for name, address in NODES.items():
            host = lab.add(name, address)
            host.may_connect(lab.key)
            entries = (f"Host {node}\n HostName {at}\n User root\n" for node, at in NODES.items())
            (host.home / ".ssh" / "config").write_text("".join(entries))
        yield slurm


@pytest.mark.timeout(300)
def test_job_saves_before_its_time_ends_and_continues_to_the_same_bits(slurm, data, tmp_path):
    """Two tasks of an array on the same nodes at the same time: the first is stopped and requeued, the second not."""
    changes = {"steps": JOB_STEPS, "checkpoint": {"every_steps": 5000}, "scaling": {"num_workers": 2}}
    values = runs.train_values(data, tmp_path / "unused", **changes)
    config = runs.write_config(tmp_path / "tiny.yaml", train=values)
    arguments = ("train", config, f"run={tmp_path}/%x-%a")
    first, second = (slurm.batch(task, 0, *arguments) for task in (0, 1))
    stopped, undisturbed = tmp_path / "tiny-0", tmp_path / "tiny-1"
    runs.wait_for_step(first, None, stopped, STOPPED_AT, timeout=150)
    # As `--signal=B:` does; the process entered the node's namespaces for the shell.
    os.kill(int(Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text()), signal.SIGUSR1)
    assert first.wait(60) == 0, slurm.log(0)
    # The second may have ended by now: which of the two gets the cores first is chance.
    assert not [folder for folder in slurm.folders() if folder.endswith(f"-{JOB}")], "those of the first task"
    assert slurm.requeued.read_text() == f"{JOB}\n"
    assert "after SIGTERM; the same command continues" in slurm.log(0)
    steps = runs.steps_of(stopped)
    assert STOPPED_AT <= max(steps) < JOB_STEPS

    again = slurm.batch(0, 1, *arguments)
    assert second.wait(120) == 0, slurm.log(1)
    assert again.wait(120) == 0, slurm.log(0)
    assert f"continuing after step {max(steps)} of {JOB_STEPS}" in slurm.log(0)
    assert slurm.requeued.read_text() == f"{JOB}\n"
    assert_same_bits(stopped, undisturbed)
    assert slurm.folders() == []
