"""The shell of deploy/slurm.sbatch: arguments, signals, requeues, statuses; with stand-ins for Slurm, Ray and declutr.

tests/integration/test_slurm.py runs it with the real Ray and declutr.
"""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from processes import until

ROOT = Path(__file__).resolve().parents[2]
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
JOB = {
    "SLURM_JOB_ID": "40321",
    "SLURM_JOB_NAME": "base",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_JOB_NODELIST": "a",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_CPUS_ON_NODE": "3",
}


@pytest.fixture
def place(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def batch(place, *arguments, **variables):
    """Starts the script; `job` holds the variables of Slurm."""
    environment = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "PLACE": str(place), "HOME": str(place)}
    environment |= {"DECLUTR_SCRATCH": str(place), "SLURM_SUBMIT_DIR": str(place), **JOB, **variables}
    return subprocess.Popen(
        ["bash", SCRIPT, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process):
    """Status and messages."""
    out, said = process.communicate(timeout=60)
    return process.returncode, out + said


def told(place, name):
    return (place / name).read_text() if (place / name).exists() else ""


def signalled(place, process, *numbers):
    until((place / "running").exists, "the command", 30)
    for count, number in enumerate(numbers):
        until(lambda count=count: len(told(place, "signals")) >= count, "the signal before", 30)
        process.send_signal(number)
    return ended(process)


def test_command_gets_arguments_cluster_and_workers_for_the_gpus_of_all_nodes(place):
    process = batch(
        place,
        *("train", "configs/x.yaml", "run=runs/%x-%a", "data=%j"),
        **{"ENDS": "0", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "a,b"},
        SLURM_MEM_PER_NODE="1000",
    )
    assert ended(process) == (0, "")
    assert told(place, "arguments").split() == [
        *("train", "configs/x.yaml", "run=runs/base-3", "data=40321", "scaling.shutdown_grace_seconds=120"),
        *("scaling.device=cuda", "scaling.num_workers=8"),
    ]
    assert told(place, "cluster").split() == ["192.0.2.1:4321", "token", "64"]
    head, worker = told(place, "ray").splitlines()
    assert {
        "--node-ip-address=192.0.2.9",
        "--head",
        "--port=0",
        "--include-dashboard=false",
        "--ray-client-server-port=12321",
    } <= set(head.split())
    assert {"--num-cpus=3", "--memory=734003200", "--object-store-memory=209715200"} <= set(head.split())
    assert "--address=192.0.2.1:4321" in worker.split()
    assert not list(place.glob("declutr-*")), "the folders of the nodes"


def test_given_settings_and_other_commands_get_no_defaults(place):
    given = ("train", "x.yaml", "scaling.num_workers=1", "scaling.device=cpu", "scaling.shutdown_grace_seconds=9")
    for arguments in (given, ("prepare", "x.yaml")):
        assert ended(batch(place, *arguments, ENDS="0", SLURM_GPUS_ON_NODE="4")) == (0, "")
        assert told(place, "arguments").split() == list(arguments)


@pytest.mark.parametrize(
    ("numbers", "variables", "status", "requeued"),
    [
        ([signal.SIGUSR1], {}, 0, True),
        ([signal.SIGUSR1, signal.SIGUSR1], {"SLURM_RESTART_COUNT": "99"}, 0, True),
        ([signal.SIGTERM], {}, 143, False),
        ([signal.SIGUSR1], {"STATUS": "0"}, 0, False),  # it had reached its last step
        ([signal.SIGUSR1], {"STATUS": "1"}, 1, False),
        ([signal.SIGUSR1], {"SLURM_RESTART_COUNT": "100"}, 1, False),
    ],
)
def test_signal_reaches_the_command_once_and_decides_on_the_requeue(place, numbers, variables, status, requeued):
    process = batch(place, "train", "x.yaml", **variables)
    found, said = signalled(place, process, *numbers)
    assert found == status
    assert told(place, "requeued") == ("40321\n" if requeued else "")
    assert told(place, "signals") == "TERM\n"
    assert ("submit the same command again" in said) == ("100" in variables.values())
    assert not list(place.glob("declutr-*"))


def test_signal_while_ray_starts_requeues_without_a_start_of_the_command(place):
    (place / "bin" / "ray").write_text(
        (place / "bin" / "ray").read_text().replace("mkdir", "until [ -e $PLACE/go ]; do sleep 0.05; done; mkdir")
    )
    process = batch(place, "train", "x.yaml")
    until(lambda: told(place, "ray"), "the head", 30)
    process.send_signal(signal.SIGUSR1)
    (place / "go").touch()
    assert ended(process)[0] == 0
    assert told(place, "requeued") == "40321\n"
    assert not (place / "arguments").exists()


def test_failures_say_what_to_do(place):
    status, said = ended(batch(place, "train", "x.yaml", RAY_FAILS="1"))
    assert status == 1
    assert "Ray's head did not start on a" in said
    assert "no memory" in said, "Ray's own reason"
    status, said = signalled(place, batch(place, "train", "x.yaml", REQUEUE_STATUS="1"), signal.SIGUSR1)
    assert status == 1
    assert "not requeued; submit the same command again" in said
    assert "sbatch" in ended(batch(place, "train", "x.yaml", SLURM_JOB_ID=""))[1]
    assert "a has no address but 127.x" in ended(batch(place, "train", "x.yaml", ADDRESSES=""))[1]
    assert "usage: sbatch deploy/slurm.sbatch COMMAND" in ended(batch(place, "train"))[1]
    (place / "bin" / "declutr").unlink()
    status, said = ended(batch(place, "train", "x.yaml", PATH=f"{place / 'bin'}:/usr/bin:/bin"))
    assert status == 1
    assert f"set DECLUTR_VENV to its virtual environment (now {place}/.venv)" in said


def test_folder_of_another_user_is_refused(place):
    if os.geteuid() != 0:
        pytest.skip("needs root to make one")
    (place / "declutr-40321").mkdir()
    os.chown(place / "declutr-40321", 12345, 12345)
    status, said = ended(batch(place, "train", "x.yaml"))
    assert status == 1
    assert "declutr-40321" in said
    assert not told(place, "ray")


def test_script_is_clean_and_asks_slurm_for_the_signal_and_the_requeue():
    text = SCRIPT.read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", text, re.MULTILINE))
    assert re.fullmatch(r"B:USR1@\d+", options["signal"]), "to the script alone"
    assert "requeue" in options
    assert options["open-mode"] == "append"
    grace = int(re.search(r"shutdown_grace_seconds=(\d+)", text)[1])
    assert grace + 60 <= int(options["signal"].partition("@")[2]), "and time to end"
    assert not re.search(r"0\.0\.0\.0|dashboard-host|AUTH_MODE=disabled|ray stop", text)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, check=False)
        assert done.stdout == ""
