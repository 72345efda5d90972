"""The shell of deploy/slurm.sbatch: arguments, signals, requeues, statuses; with stand-ins for Slurm, Ray and declutr.

tests/integration/test_cluster.py runs it with the real Ray and declutr.
"""

import os
import re
import shutil
import signal
import subprocess

import pytest
from processes import ROOT, until

SCRIPT = ROOT / "deploy" / "slurm.sbatch"
# All run here: a node is a process of this machine. `ray` lives until SIGTERM; `declutr` ends by what it is sent.
STAND_INS = {
    "srun": """for one in "$@"; do case $one in --*) shift ;; *) break ;; esac; done
        SLURM_CPUS_ON_NODE=3 "$@" & task=$!
        trap 'kill $task' TERM; wait $task; wait $task""",
    "scontrol": """case "$1" in
        show) echo "$3" | tr , '\\n' ;;
        requeue) echo "$2" >> "$PLACE/requeued"; exit "${REQUEUE_STATUS:-0}" ;; esac""",
    "getent": "echo 127.0.1.1 STREAM; exit 2",  # as Debian names a host
    "hostname": 'case "$1" in -I) echo "${ADDRESSES-192.0.2.9 10.0.0.9}" ;; *) echo a ;; esac',
    "ray": """echo "$@" >> "$PLACE/ray"; [ -z "${RAY_FAILS:-}" ] || { echo no memory; exit 7; }
        for one in "$@"; do case $one in --temp-dir=*) folder=${one#*=} ;; esac; done
        mkdir -p "$folder"; case "$*" in *--head*) echo 192.0.2.1:4321 > "$folder/ray_current_cluster" ;; esac
        while :; do sleep 0.05; done""",
    "declutr": """until [ "$(wc -l < "$PLACE/ray")" -ge "$SLURM_JOB_NUM_NODES" ]; do sleep 0.05; done
        printf '%s\\n' "$@" > "$PLACE/arguments"; echo "$RAY_ADDRESS $RAY_AUTH_MODE" > "$PLACE/cluster"
        echo "${#RAY_AUTH_TOKEN}" >> "$PLACE/cluster"
        trap 'echo TERM >> "$PLACE/signals"; sleep 0.3; exit ${STATUS:-143}' TERM
        touch "$PLACE/running"; [ -z "${ENDS:-}" ] || exit "$ENDS"; while :; do sleep 0.05; done""",
}
JOB = {"SLURM_JOB_ID": "40321", "SLURM_JOB_NAME": "base", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_NODELIST": "a"}
JOB |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "3"}


@pytest.fixture
def place(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def batch(place, *arguments, **variables):
    environment = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "PLACE": str(place), "HOME": str(place)}
    environment |= {"DECLUTR_SCRATCH": str(place), "SLURM_SUBMIT_DIR": str(place), **JOB, **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(["bash", SCRIPT, *arguments], env=environment, **pipes)


def ended(process):
    out, messages = process.communicate(timeout=60)
    return process.returncode, out + messages


def finish(place, *arguments, **variables):
    return ended(batch(place, *arguments, **variables))


def written(place, name):
    return (place / name).read_text() if (place / name).exists() else ""


def signalled(place, process, *numbers):
    until((place / "running").exists, "the command", 30)
    for count, number in enumerate(numbers):
        until(lambda count=count: len(written(place, "signals")) >= count, "the signal before", 30)
        process.send_signal(number)
    return ended(process)


def test_command_gets_arguments_cluster_and_workers_for_the_gpus_of_all_nodes(place):
    nodes = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "a,b", "SLURM_MEM_PER_NODE": "1000"}
    arguments = "train", "configs/x.yaml", "run=runs/%x-%a", "data=%j"
    assert finish(place, *arguments, ENDS="0", SLURM_GPUS_ON_NODE="4", **nodes) == (0, "")
    assert written(place, "arguments").split() == [
        *("train", "configs/x.yaml", "run=runs/base-3", "data=40321", "scaling.shutdown_grace_seconds=120"),
        *("scaling.device=cuda", "scaling.num_workers=8"),
    ]
    assert written(place, "cluster").split() == ["192.0.2.1:4321", "token", "64"]
    head, worker = (set(line.split()) for line in written(place, "ray").splitlines())
    assert {"--node-ip-address=192.0.2.9", "--head", "--port=0", "--include-dashboard=false"} <= head
    assert {"--ray-client-server-port=12321", "--num-cpus=3", "--memory=734003200"} <= head
    assert "--object-store-memory=209715200" in head
    assert "--address=192.0.2.1:4321" in worker
    assert not list(place.glob("declutr-*")), "the folders of the nodes"
    settings = ("train", "x.yaml", "scaling.num_workers=1", "scaling.device=cpu", "scaling.shutdown_grace_seconds=9")
    for arguments in (settings, ("prepare", "x.yaml")):  # neither gets a default
        assert finish(place, *arguments, ENDS="0", SLURM_GPUS_ON_NODE="4") == (0, "")
        assert written(place, "arguments").split() == list(arguments)


USR1 = signal.SIGUSR1
SIGNALS = [([USR1], {}, 0, True), ([USR1, USR1], {"SLURM_RESTART_COUNT": "99"}, 0, True)]
SIGNALS += [([signal.SIGTERM], {}, 143, False), ([USR1], {"SLURM_RESTART_COUNT": "100"}, 1, False)]
SIGNALS += [([USR1], {"STATUS": status}, int(status), False) for status in "01"]  # 0: it had reached its last step


@pytest.mark.parametrize(("numbers", "variables", "status", "requeued"), SIGNALS)
def test_signal_reaches_the_command_once_and_decides_on_the_requeue(place, numbers, variables, status, requeued):
    code, messages = signalled(place, batch(place, "train", "x.yaml", **variables), *numbers)
    assert (code, written(place, "requeued")) == (status, "40321\n" if requeued else "")
    assert written(place, "signals") == "TERM\n"
    assert ("submit the same command again" in messages) == ("100" in variables.values())
    assert not list(place.glob("declutr-*"))


def test_signal_while_ray_starts_requeues_without_a_start_of_the_command(place):
    waiting = STAND_INS["ray"].replace("mkdir", "until [ -e $PLACE/go ]; do sleep 0.05; done; mkdir")
    (place / "bin" / "ray").write_text(f"#!/bin/bash\n{waiting}\n")
    process = batch(place, "train", "x.yaml")
    until(lambda: written(place, "ray"), "the head", 30)
    process.send_signal(signal.SIGUSR1)
    (place / "go").touch()
    assert (ended(process)[0], written(place, "requeued")) == (0, "40321\n")
    assert not (place / "arguments").exists()


def test_failures_say_what_to_do(place):
    job = "train", "x.yaml"
    status, messages = finish(place, *job, RAY_FAILS="1")
    assert status == 1
    assert "Ray's head did not start on a" in messages
    assert "no memory" in messages, "Ray's own reason"
    status, messages = signalled(place, batch(place, *job, REQUEUE_STATUS="1"), signal.SIGUSR1)
    assert status == 1
    assert "not requeued; submit the same command again" in messages
    assert "sbatch" in finish(place, *job, SLURM_JOB_ID="")[1]
    assert "a has no address but 127.x" in finish(place, *job, ADDRESSES="")[1]
    assert "usage: sbatch deploy/slurm.sbatch COMMAND" in finish(place, "train")[1]
    (place / "bin" / "declutr").unlink()
    status, messages = finish(place, *job, PATH=f"{place / 'bin'}:/usr/bin:/bin")
    assert status == 1
    assert f"set DECLUTR_VENV to its virtual environment (now {place}/.venv)" in messages


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make one")
def test_folder_of_another_user_is_refused(place):
    (place / "declutr-40321").mkdir()
    os.chown(place / "declutr-40321", 12345, 12345)
    status, messages = finish(place, "train", "x.yaml")
    assert (status, written(place, "ray")) == (1, "")
    assert "declutr-40321" in messages


def test_script_is_clean_and_asks_slurm_for_the_signal_and_the_requeue():
    text = SCRIPT.read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", text, re.MULTILINE))
    assert re.fullmatch(r"B:USR1@\d+", options["signal"]), "to the script alone"
    assert (options["requeue"], options["open-mode"]) == ("", "append")
    grace = int(re.search(r"shutdown_grace_seconds=(\d+)", text)[1])
    assert grace + 60 <= int(options["signal"].partition("@")[2]), "and time to end"
    assert not re.search(r"0\.0\.0\.0|dashboard-host|AUTH_MODE=disabled|ray stop", text)
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", SCRIPT], capture_output=True, check=False).stdout == b""
