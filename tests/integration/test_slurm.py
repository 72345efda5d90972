"""deploy/slurm.sbatch on real Ray and two hosts in namespaces; srun and scontrol are stand-ins, the test is Slurm."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tinyruns as runs
from lab import Lab, missing
from processes import until

from declutr.common.storage import hash_file

NODES = {"node1": "10.79.0.1", "node2": "10.79.0.2"}
STEPS, STOPPED_AT = 400, 10  # a stop takes a second or two, this many steps several
CHANGES = {"steps": STEPS, "checkpoint": {"every_steps": 5000}}
JOB = 701

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

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(300)]


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

    def start_nodes(self):
        for name, address in NODES.items():
            host = self.lab.add(name, address)
            host.may_connect(self.lab.key)
            (host.home / ".ssh" / "config").write_text(
                "".join(f"Host {one}\n HostName {at}\n User root\n" for one, at in NODES.items())
            )

    def batch(self, task, restarts, *arguments):
        """The process of the batch shell's parent, and the job's log."""
        job = {"SLURM_JOB_ID": JOB + task, "SLURM_ARRAY_TASK_ID": task, "SLURM_RESTART_COUNT": restarts}
        allocation = {"SLURM_JOB_NODELIST": "node1,node2", "SLURM_JOB_NUM_NODES": 2, "SLURM_CPUS_ON_NODE": 2}
        more = {"SLURM_JOB_NAME": "tiny", "SLURM_SUBMIT_DIR": self.folder, "SLURM_MEM_PER_NODE": 2000}
        path = f"{self.folder}/bin:{sys.prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        host = self.lab.hosts["node1"]
        command = host.command(
            "bash",
            runs.ROOT / "deploy" / "slurm.sbatch",
            *arguments,
            env={**job, **allocation, **more, "PATH": path},
            folder=self.folder,
        )
        with (self.folder / f"tiny-{task}.log").open("a") as log:  # --open-mode=append
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def log(self, task):
        return (self.folder / f"tiny-{task}.log").read_text()

    def signal_shell(self, job, number):
        """As `--signal=B:` does; `job` is the process that entered the node's namespaces for the shell."""
        os.kill(int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text()), number)

    def folders(self):
        """Folders of jobs that are on the nodes now; Slurm itself ends what still runs when the script has ended."""
        return [str(path) for host in self.lab.hosts.values() for path in (host.folder / "tmp").glob("declutr-[0-9]*")]


@pytest.fixture
def slurm(tmp_path, data):
    if reason := missing():
        pytest.skip(reason)
    slurm = Slurm(tmp_path, data)
    with slurm.lab:
        slurm.start_nodes()
        yield slurm


def test_job_saves_before_its_time_ends_and_continues_to_the_same_bits(slurm, data, tmp_path):
    """Two tasks of an array on the same nodes at the same time: the first is stopped and requeued, the second not."""
    values = runs.train_values(data, tmp_path / "unused", **CHANGES, scaling={"num_workers": 2})
    config = runs.write_config(tmp_path / "tiny.yaml", train=values)
    arguments = ("train", config, f"run={tmp_path}/%x-%a")
    first, second = (slurm.batch(task, 0, *arguments) for task in (0, 1))
    stopped, undisturbed = tmp_path / "tiny-0", tmp_path / "tiny-1"

    def reached(job, run, step, log):
        assert job.poll() is None, slurm.log(log)
        metrics = run / "metrics.jsonl"
        return metrics.is_file() and f'"step": {step},' in metrics.read_text()

    until(lambda: reached(first, stopped, STOPPED_AT, 0), f"step {STOPPED_AT}", 150)
    slurm.signal_shell(first, signal.SIGUSR1)
    assert first.wait(60) == 0, slurm.log(0)
    # The second may have ended by now: which of the two gets the cores first is chance.
    assert not [folder for folder in slurm.folders() if folder.endswith(f"-{JOB}")], "those of the first task"
    assert slurm.requeued.read_text() == f"{JOB}\n"
    assert "after SIGTERM; the same command continues" in slurm.log(0)
    steps = runs.steps_of(stopped)
    assert STOPPED_AT <= max(steps) < STEPS

    again = slurm.batch(0, 1, *arguments)
    assert second.wait(120) == 0, slurm.log(1)
    assert again.wait(120) == 0, slurm.log(0)
    assert f"continuing after step {max(steps)} of {STEPS}" in slurm.log(0)
    assert slurm.requeued.read_text() == f"{JOB}\n"
    assert runs.steps_of(stopped) == runs.steps_of(undisturbed)
    exported = [hash_file(run / "export" / "model.safetensors") for run in (stopped, undisturbed)]
    assert exported[0] == exported[1]
    assert slurm.folders() == []
