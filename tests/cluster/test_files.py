"""cluster.yaml, the image and the KubeRay job as far as they can be judged without a cloud: valid, safe, up to date."""

import os
import re
import shlex
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import ray
import yaml
from processes import ROOT, run_python
from ray.autoscaler._private.node_provider_availability_tracker import NodeAvailabilitySummary
from ray.autoscaler._private.resource_demand_scheduler import _default_utilization_scorer, get_nodes_for
from ray.autoscaler._private.util import prepare_config, validate_config

from declutr.common.config import load_config
from declutr.pipeline.config import PipelineConfig
from declutr.trainer.config import TrainConfig

DOCUMENT = ROOT / "docs/guides/cluster.md"
KUBERNETES = ROOT / "docs/guides/kubernetes.md"
SECTIONS = {"prepare": PipelineConfig, "train": TrainConfig}


def read(name):
    return yaml.safe_load((ROOT / name).read_text())


def blocks(page, holding):
    """Blocks of YAML of a page, with these words."""
    found = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    return [block for block in found if holding in block]


def variant(provider):
    """cluster.yaml with the keys that deploy/gcp.yaml or docs/guides/cluster.md gives in place of its own."""
    changed = read("cluster.yaml")
    if provider == "gcp":
        changed |= read("deploy/gcp.yaml")
    else:  # Ray has node types of its own for hosts that are there already
        (block,) = blocks(DOCUMENT, f"type: {provider}")
        changed |= yaml.safe_load(block)
        del changed["available_node_types"], changed["head_node_type"]
    return changed


@pytest.mark.parametrize("provider", ["aws", "gcp", "local"])
def test_cluster_file_and_its_variants_are_what_ray_up_takes(provider):
    config = read("cluster.yaml") if provider == "aws" else variant(provider)
    prepared = prepare_config(config)
    validate_config(prepared)
    workers = [node for name, node in prepared["available_node_types"].items() if name != prepared["head_node_type"]]
    assert all(node["min_workers"] < node["max_workers"] for node in workers)
    gives_every_host_a_token_and_opens_no_port(prepared)


def gives_every_host_a_token_and_opens_no_port(config):
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert [line for line in config["setup_commands"] if "RAY_AUTH_MODE=token" in line]  # of head and workers
    head, worker = " ".join(config["head_start_ray_commands"]), " ".join(config["worker_start_ray_commands"])
    assert "--dashboard-host=127.0.0.1" in head
    names = ("cluster.yaml", "deploy/gcp.yaml", "docs/guides/cluster.md")
    for text in (head, worker, *((ROOT / name).read_text() for name in names)):
        assert "0.0.0.0" not in text
        assert "RAY_AUTH_MODE=disabled" not in text


def install_lines():
    """What `make setup` installs, with its variables in place; without Triton, which torch for CUDA installs itself."""
    makefile = (ROOT / "Makefile").read_text()
    pip = re.search(r"^PIP = (.*)$", makefile, re.MULTILINE)[1]
    recipe = makefile.partition("$(STAMP): ")[2].partition("@touch $(STAMP)")[0].splitlines()
    lines = [line.strip().removeprefix("@") for line in recipe if line.startswith("\t@$(PIP)")]
    lines = [line.replace("$(PIP)", pip) for line in lines]
    assert len(lines) == 3
    lines = [line.replace("$(BIN)/python -m pip install ", "").replace("$(TORCH)", "torch") for line in lines]
    lines = [line.replace("--no-compile ", "") for line in lines]  # an image and a host are set up once, to start often
    return [line.replace("requirements.lock", "requirements-run.lock") for line in lines]  # without tools for tests


def test_the_install_is_that_of_the_makefile():
    setup = [line for line in read("cluster.yaml")["setup_commands"] if "pip install" in line]
    for place, prefix in (("~/declutr/", "~/venv/bin/python -m pip install "), ("", "")):
        if place:
            found = [line.removeprefix(prefix).replace(place, "").replace("-e ~/declutr", "-e .") for line in setup]
        else:
            text = (ROOT / "Dockerfile").read_text().replace("--no-cache-dir ", "")
            found = [line.rstrip("\\ ") for line in re.findall(r"pip install (.*)", text)]
            found = [line.replace("$TORCH", "torch") for line in found]
        assert found == install_lines()


def test_all_of_the_code_travels():
    wanted = {path.name for path in (ROOT / "src" / "declutr").iterdir() if path.is_symlink()} | {"src", "benchmarks"}
    wanted |= {"pyproject.toml", "README.md", "requirements-run.lock", "constraints.txt"}
    mounted = {local for remote, local in read("cluster.yaml")["file_mounts"].items() if "declutr" in remote}
    copied = set()
    for line in re.findall(r"^COPY --chown=declutr (.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE):
        copied |= set(line.split())
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert mounted == copied == allowed == wanted
    assert all((ROOT / name).exists() for name in wanted)


def test_image_runs_as_nobody_in_particular_and_holds_no_secret():
    text = (ROOT / "Dockerfile").read_text()
    assert text.index("\nUSER declutr\n") < text.index("\nCOPY ")
    assert not re.search(r"(?i)token|secret|password|EXPOSE|--privileged", text)


def commands(text):
    """The arguments of every `ray submit ... -- ...`, `declutr ...` and job of Slurm in a text."""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip().lstrip("#").strip().removeprefix("entrypoint: ")
        if match := re.match(r"ray submit cluster\.yaml (pipeline/prepare|trainer/train)\.py -- (.*)", line):
            yield match[1].rpartition("/")[2], match[2]
        elif match := re.match(r"(?:sbatch .*deploy/slurm\.sbatch|declutr) (prepare|train) (.*)", line):
            yield match[1], match[2].replace("seed=%a", "seed=0")
        elif match := re.match(r'sbatch .*--wrap "exec declutr (train) (.*)"', line):
            yield match[1], match[2]


@pytest.mark.parametrize(
    "name",
    [
        *("cluster.yaml", "deploy/kuberay.yaml", "deploy/slurm.sbatch"),
        *(f"docs/guides/{name}.md" for name in ("cluster", "kubernetes", "slurm")),
    ],
)
def test_every_command_line_is_one_that_we_understand(name):
    found = list(commands((ROOT / name).read_text()))
    assert found
    for section, arguments in found:
        assert not set(arguments) & set("{}*?$\"'"), "ray submit joins arguments without quotes"
        config, *overrides = shlex.split(arguments)
        load_config(config, section, SECTIONS[section], overrides)


def pods():
    cluster = read("deploy/kuberay.yaml")["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_kuberay_job_asks_for_what_it_needs_and_no_more():
    job = read("deploy/kuberay.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] in (ROOT / "requirements-run.lock").read_text()
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] < group["maxReplicas"]
    for pod in pods():
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert pod["securityContext"]["runAsNonRoot"]
        assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])
        assert not [port for port in container.get("ports", []) if "hostPort" in port]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    head, gpu, cpu = (pod["containers"][0].get("env", []) for pod in pods())
    assert (head, gpu, cpu) == (
        [{"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "60"}],  # Ray reads both (below), and nothing else is set
        [{"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": "50"}],
        [],
    )
    for (variable,), pod in ((head, pods()[0]), (gpu, pods()[1])):
        assert int(variable["value"]) < pod["terminationGracePeriodSeconds"]
    (submitter,) = job["spec"]["submitterPodTemplate"]["spec"]["containers"]
    scaler = cluster["autoscalerOptions"]
    assert submitter["securityContext"] == scaler["securityContext"] == pods()[0]["containers"][0]["securityContext"]
    assert job["spec"]["submitterPodTemplate"]["spec"]["securityContext"] == pods()[0]["securityContext"]


def test_ray_knows_the_variables_of_the_pods():
    sources = {"RAY_JOB_STOP_WAIT_TIME_S": "dashboard/modules/job/job_supervisor.py"}
    sources |= {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "_private/ray_constants.py"}
    for name, source in sources.items():
        assert name in (Path(ray.__file__).parent / source).read_text()


BYTES = {"Gi": 2**30, "Mi": 2**20}


def num_bytes(text):
    return int(text[:-2]) * BYTES[text[-2:]]


def test_memory_volumes_fit_into_the_memory_of_their_pods_and_hold_the_object_store():
    cluster = read("deploy/kuberay.yaml")["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        limit = num_bytes(pod["containers"][0]["resources"]["limits"]["memory"])
        (volume,) = (one["emptyDir"] for one in pod["volumes"] if one.get("emptyDir", {}).get("medium") == "Memory")
        assert int(group["rayStartParams"]["object-store-memory"]) < num_bytes(volume["sizeLimit"]) <= limit / 3


@pytest.mark.parametrize("name", ["cluster.yaml", "deploy/kuberay.yaml", "docs/guides/cluster.md"])
def test_every_training_asks_for_the_gpus_that_its_nodes_will_have(name):
    """Not `auto`, which looks at the nodes that have joined at that moment."""
    found = [arguments for section, arguments in commands((ROOT / name).read_text()) if section == "train"]
    assert found
    for arguments in found:
        assert "scaling.device=cuda" in arguments.split()
        assert ("scaling.spot_notices=aws" in arguments.split()) == (name != "deploy/kuberay.yaml")


@pytest.mark.parametrize("name", ["cluster.yaml", "deploy/kuberay.yaml", "docs/guides/cluster.md"])
def test_one_host_has_a_gpu_for_every_worker_of_the_documented_run(name):
    config, *overrides = next(
        shlex.split(arguments) for section, arguments in commands((ROOT / name).read_text()) if section == "train"
    )
    scaling = load_config(config, "train", TrainConfig, overrides).scaling
    cluster = read("cluster.yaml")
    assert len(cluster["provider"]["availability_zone"].split(",")) == 1
    aws, gcp = cluster["available_node_types"]["gpu_worker"], variant("gcp")["available_node_types"]["gpu_worker"]
    group, _ = read("deploy/kuberay.yaml")["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    sizes = [(node["resources"]["GPU"], node["resources"]["CPU"]) for node in (aws, gcp)]
    for gpus, cpus in [*sizes, (int(pod["nvidia.com/gpu"]), int(pod["cpu"]))]:
        assert gpus == scaling.most_workers
        assert cpus > scaling.most_workers * scaling.cpus_per_worker, "and CPUs for the tasks that read shards"


def started_for(demands):
    """Node types that Ray's autoscaler adds to the head of cluster.yaml for tasks that ask for these resources."""
    types = prepare_config(read("cluster.yaml"))["available_node_types"]
    most = sum(node["max_workers"] for node in types.values())
    scorer = partial(_default_utilization_scorer, node_availability_summary=NodeAvailabilitySummary({}))
    added, unmet = get_nodes_for(types, {"head": 1}, "head", most, demands, scorer)
    assert unmet == []
    return added


def test_hosts_start_for_work_alone_and_those_with_gpus_for_training_alone():
    scaling = load_config("configs/declutr-base.yaml", "train", TrainConfig, []).scaling
    config = read("cluster.yaml")
    workers = {name: node for name, node in config["available_node_types"].items() if name != "head"}
    assert all(node["min_workers"] == 0 for node in workers.values())
    assert config["max_workers"] == sum(node["max_workers"] for node in workers.values())
    assert started_for([{"CPU": 1}] * 40) == {"cpu_worker": 2}, "of preparation, or of reading shards"
    worker = {"CPU": scaling.cpus_per_worker, "GPU": 1}
    assert started_for([worker] * scaling.most_workers) == {"gpu_worker": 1}
    for group in read("deploy/kuberay.yaml")["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == 0


STAND_IN = """#!/bin/sh
name=${0##*/}
case "$name $*" in
  "lsblk "*) cat "$FAKE/devices" ;;
  "mountpoint -q "*) grep -qx "$2" "$FAKE/mounted" ;;
  "blkid "*) grep -qx "$1" "$FAKE/formatted" ;;
  "mount "*) echo "$name $*" >> "$FAKE/log"; test ! -e "$FAKE/broken" ;;
  "sudo "*) "$@" ;;
  *) echo "$name $*" >> "$FAKE/log" ;;
esac
"""


def local_disk(folder, **state):
    """What the command for local disks does on a host of this state: its changes, and the host's cache folder."""
    (command,) = (line for line in read("cluster.yaml")["setup_commands"] if "lsblk" in line)
    programs, home, local = folder / "bin", folder / "home", folder / "local"
    for made in (programs, home):
        made.mkdir(exist_ok=True)
    for name in ("lsblk", "mountpoint", "blkid", "mkfs.ext4", "mount", "sudo"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)
    given = {"devices": "", "mounted": "", "formatted": ""} | state
    for name, text in given.items():
        (folder / name).write_text(text)
    (folder / "log").write_text("")
    command = command.replace("/local", str(local)).replace("/opt/dlami/nvme", str(folder / "dlami"))
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "FAKE": str(folder)}
    subprocess.run(["bash", "-c", command], env=environment, check=True, timeout=30)
    cache = home / ".cache" / "declutr"
    log = (folder / "log").read_text().replace(str(folder), "").splitlines()
    return log, str(cache.resolve()).removeprefix(str(folder)) if cache.exists() else None


NVME = "/dev/nvme0n1 Amazon Elastic Block Store\n/dev/nvme1n1 Amazon EC2 NVMe Instance Storage\n"


def test_local_disk_is_formatted_once_and_holds_the_cache(tmp_path):
    assert local_disk(tmp_path) == ([], None), "no local disk, as on the head"
    fresh = ["mkfs.ext4 -q /dev/nvme1n1", "mount -o noatime /dev/nvme1n1 /local"]
    assert local_disk(tmp_path, devices=NVME, broken="")[1] is None, "it cannot be mounted, so the cache stays"
    (tmp_path / "broken").unlink()
    assert local_disk(tmp_path, devices=NVME) == (fresh, "/local/cache")
    mounted = {"devices": NVME, "mounted": f"{tmp_path}/local\n"}
    assert local_disk(tmp_path, **mounted) == ([], "/local/cache"), "a repeated `ray up`"
    again = {"devices": NVME, "formatted": "/dev/nvme1n1\n"}
    assert local_disk(tmp_path, **again) == (fresh[1:], "/local/cache"), "after a restart"


def test_local_disk_that_the_image_has_mounted_is_used(tmp_path):
    (tmp_path / "dlami").mkdir()
    assert local_disk(tmp_path, devices=NVME, mounted=f"{tmp_path}/dlami\n") == ([], "/dlami/cache")


def test_workers_spill_to_the_local_disk_if_there_is_one(tmp_path):
    (command,) = (line for line in read("cluster.yaml")["worker_start_ray_commands"] if "ray start" in line)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ray").write_text('#!/bin/sh\necho "$@"\n')
    (programs / "ray").chmod(0o755)
    command = command.replace("ulimit -n 65536; ", "").replace("/local", str(tmp_path / "local"))
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "RAY_HEAD_IP": "10.0.0.1"}
    for there in (False, True):
        if there:
            (tmp_path / "local" / "spill").mkdir(parents=True)
        done = subprocess.run(["bash", "-c", command], env=environment, check=True, timeout=30, capture_output=True)
        assert (b"--object-spilling-directory" in done.stdout) == there
        assert done.stdout.startswith(b"start --address=10.0.0.1:6379 ")


def test_pods_with_gpus_tolerate_the_usual_taint():
    _, *workers = pods()
    with_gpus = [pod for pod in workers if "nvidia.com/gpu" in pod["containers"][0]["resources"]["limits"]]
    assert with_gpus
    for pod in with_gpus:
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


def test_documented_claim_is_the_one_the_job_mounts():
    (block,) = blocks(KUBERNETES, "PersistentVolumeClaim")
    claim = yaml.safe_load(block)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    named = {volume["persistentVolumeClaim"]["claimName"] for pod in pods() for volume in pod["volumes"][:1]}
    assert named == {claim["metadata"]["name"]}


@pytest.mark.slow
@pytest.mark.parametrize("script", ["pipeline/prepare.py", "trainer/train.py", "src/declutr/common/stores/copies.py"])
def test_scripts_run_from_the_home_folder(script, tmp_path):
    """As `ray submit` runs them: the file alone, copied home, with the package installed elsewhere."""
    config = {"prepare": "configs/openwebtext.yaml", "train": "configs/declutr-base.yaml"}
    copied = shutil.copy(ROOT / script, tmp_path)
    name = Path(script).stem
    arguments = [config[name], "--print-config"] if name in config else ["--help"]

    here = {"folder": tmp_path, "env": {"PYTHONWARNINGS": "ignore"}}
    assert run_python(copied, *arguments, **here).stdout
    if name in config:
        missing = run_python(copied, "configs/nowhere.yaml", check=False, **here)
        assert missing.returncode == 1
        assert str(tmp_path / "configs" / "nowhere.yaml") in missing.stderr
