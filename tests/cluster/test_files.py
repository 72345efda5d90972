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

SECTIONS = {"prepare": PipelineConfig, "train": TrainConfig}


def read(name):
    return yaml.safe_load((ROOT / name).read_text())


def block(page, holding):
    """The block of YAML of a page with these words."""
    texts = re.findall(r"```yaml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (text,) = (text for text in texts if holding in text)
    return yaml.safe_load(text)


def variant(provider):
    """cluster.yaml with the keys that deploy/gcp.yaml or docs/guides/cluster.md gives in place of its own."""
    changed = read("cluster.yaml")
    if provider == "gcp":
        changed |= read("deploy/gcp.yaml")
    else:  # Ray has node types of its own for hosts that are there already
        changed |= block("docs/guides/cluster.md", f"type: {provider}")
        del changed["available_node_types"], changed["head_node_type"]
    return changed


@pytest.mark.parametrize("provider", ["aws", "gcp", "local"])
def test_cluster_file_and_its_variants_are_what_ray_up_takes(provider):
    prepared = prepare_config(read("cluster.yaml") if provider == "aws" else variant(provider))
    validate_config(prepared)
    workers = [node for name, node in prepared["available_node_types"].items() if name != prepared["head_node_type"]]
    assert all(node["min_workers"] < node["max_workers"] for node in workers)
    # Every host has a token, and no port is open.
    assert prepared["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert [line for line in prepared["setup_commands"] if "RAY_AUTH_MODE=token" in line]  # of head and workers
    head, worker = (" ".join(prepared[f"{kind}_start_ray_commands"]) for kind in ("head", "worker"))
    assert "--dashboard-host=127.0.0.1" in head
    names = ("cluster.yaml", "deploy/gcp.yaml", "docs/guides/cluster.md")
    text = "\n".join((head, worker, *((ROOT / name).read_text() for name in names)))
    assert not re.search(r"0\.0\.0\.0|RAY_AUTH_MODE=disabled", text)


def test_the_install_is_that_of_the_makefile():
    """Its lines without Triton, which torch for CUDA installs itself."""
    makefile = (ROOT / "Makefile").read_text()
    pip = re.search(r"^PIP = (.*)$", makefile, re.MULTILINE)[1]
    recipe = makefile.partition("$(STAMP): ")[2].partition("@touch $(STAMP)")[0].splitlines()
    lines = [line.removeprefix("\t@").replace("$(PIP)", pip) for line in recipe if line.startswith("\t@$(PIP)")]
    assert len(lines) == 3
    # An image and a host are set up once, to start often; they need no tools for tests.
    changes = {"$(BIN)/python -m pip install ": "", "$(TORCH)": "torch", "--no-compile ": ""}
    expected = replaced(lines, changes | {"requirements.lock": "requirements-run.lock"})
    setup = [line for line in read("cluster.yaml")["setup_commands"] if "pip install" in line]
    changes = {"~/venv/bin/python -m pip install ": "", "-e ~/declutr": "-e .", "~/declutr/": ""}
    assert replaced(setup, changes) == expected
    image = re.findall(r"pip install (.*)", (ROOT / "Dockerfile").read_text().replace("--no-cache-dir ", ""))
    assert replaced([line.rstrip("\\ ") for line in image], {"$TORCH": "torch"}) == expected


def replaced(lines, changes):
    for old, new in changes.items():
        lines = [line.replace(old, new) for line in lines]
    return lines


def test_all_of_the_code_travels_and_the_image_holds_no_secret():
    names = {path.name for path in (ROOT / "src" / "declutr").iterdir() if path.is_symlink()} | {"src", "benchmarks"}
    names |= {"pyproject.toml", "README.md", "LICENSE", "NOTICE", "requirements-run.lock", "constraints.txt"}
    mounted = {local for remote, local in read("cluster.yaml")["file_mounts"].items() if "declutr" in remote}
    text = (ROOT / "Dockerfile").read_text()
    copied = " ".join(re.findall(r"^COPY --chown=declutr (.*) \S+$", text, re.MULTILINE)).split()
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert mounted == set(copied) == allowed == names
    assert all((ROOT / name).exists() for name in names)
    # The image runs as nobody in particular and holds no secret.
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


TRAININGS = ["cluster.yaml", "deploy/kuberay.yaml", "docs/guides/cluster.md"]
PAGES = [*TRAININGS, "deploy/slurm.sbatch", "docs/guides/kubernetes.md", "docs/guides/slurm.md"]


@pytest.mark.parametrize("name", PAGES)
def test_every_command_line_is_one_that_we_understand(name):
    lines = list(commands((ROOT / name).read_text()))
    assert lines
    for section, arguments in lines:
        assert not set(arguments) & set("{}*?$\"'"), "ray submit joins arguments without quotes"
        config, *overrides = shlex.split(arguments)
        load_config(config, section, SECTIONS[section], overrides)


def groups():
    """The head's group and those of the workers of the KubeRay job, and their pods."""
    cluster = read("deploy/kuberay.yaml")["spec"]["rayClusterSpec"]
    specs = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return specs, [group["template"]["spec"] for group in specs]


def test_kuberay_job_asks_for_what_it_needs_and_no_more():
    job = read("deploy/kuberay.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] in (ROOT / "requirements-run.lock").read_text()
    specs, pods = groups()
    for group in specs[1:]:
        assert 0 == group["minReplicas"] == group["replicas"] < group["maxReplicas"]
    for group, pod in zip(specs, pods, strict=True):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert pod["securityContext"]["runAsNonRoot"]
        assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])
        assert not [port for port in container.get("ports", []) if "hostPort" in port]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        # A volume in memory fits into the memory of its pod and holds the object store.
        (place,) = (volume["emptyDir"] for volume in pod["volumes"] if "medium" in volume.get("emptyDir", {}))
        assert place["medium"] == "Memory"
        sizes = place["sizeLimit"], container["resources"]["limits"]["memory"]
        volume, limit = (int(size[:-2]) * {"Gi": 2**30, "Mi": 2**20}[size[-2:]] for size in sizes)
        assert int(group["rayStartParams"]["object-store-memory"]) < volume <= limit / 3
    sources = [("RAY_JOB_STOP_WAIT_TIME_S", "60", "dashboard/modules/job/job_supervisor.py")]
    sources += [("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "50", "_private/ray_constants.py")]
    for (name, value, source), pod in zip(sources, pods[:2], strict=True):
        assert pod["containers"][0]["env"] == [{"name": name, "value": value}], "nothing else is set"
        assert int(value) < pod["terminationGracePeriodSeconds"]
        assert name in (Path(ray.__file__).parent / source).read_text()
    assert pods[2]["containers"][0].get("env", []) == []
    submitter = job["spec"]["submitterPodTemplate"]["spec"]
    (container,) = submitter["containers"]
    contexts = container["securityContext"], cluster["autoscalerOptions"]["securityContext"]
    assert contexts == (pods[0]["containers"][0]["securityContext"],) * 2
    assert submitter["securityContext"] == pods[0]["securityContext"]


@pytest.mark.parametrize("name", TRAININGS)
def test_every_training_asks_for_gpus_and_one_host_has_one_for_every_worker_of_the_documented_run(name):
    """Not for `auto`, which looks at the nodes that have joined at that moment."""
    trainings = [arguments for section, arguments in commands((ROOT / name).read_text()) if section == "train"]
    for arguments in trainings:
        assert "scaling.device=cuda" in arguments.split()
        assert ("scaling.spot_notices=aws" in arguments.split()) == (name != "deploy/kuberay.yaml")
    config, *overrides = shlex.split(trainings[0])
    scaling, cluster = load_config(config, "train", TrainConfig, overrides).scaling, read("cluster.yaml")
    assert len(cluster["provider"]["availability_zone"].split(",")) == 1
    aws, gcp = cluster["available_node_types"]["gpu_worker"], variant("gcp")["available_node_types"]["gpu_worker"]
    pod = groups()[1][1]["containers"][0]["resources"]["limits"]
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
    assert started_for([{"CPU": scaling.cpus_per_worker, "GPU": 1}] * scaling.most_workers) == {"gpu_worker": 1}


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


def run_with(folder, command, programs, **variables):
    """What a command prints that finds these programs first."""
    for name, text in programs.items():
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"} | variables
    return subprocess.run(["bash", "-c", command], env=environment, check=True, timeout=30, capture_output=True).stdout


def local_disk(folder, **state):
    """What the command for local disks does on a host of this state: its changes, and the host's cache folder."""
    (command,) = (line for line in read("cluster.yaml")["setup_commands"] if "lsblk" in line)
    home = folder / "home"
    home.mkdir(exist_ok=True)
    for name, text in ({"devices": "", "mounted": "", "formatted": "", "log": ""} | state).items():
        (folder / name).write_text(text)
    command = command.replace("/local", str(folder / "local")).replace("/opt/dlami/nvme", str(folder / "dlami"))
    programs = dict.fromkeys(("lsblk", "mountpoint", "blkid", "mkfs.ext4", "mount", "sudo"), STAND_IN)
    run_with(folder, command, programs, HOME=str(home), FAKE=str(folder))
    cache, log = home / ".cache" / "declutr", (folder / "log").read_text().replace(str(folder), "").splitlines()
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
    other = tmp_path / "other"  # a host whose image has mounted the disk
    (other / "dlami").mkdir(parents=True)
    assert local_disk(other, devices=NVME, mounted=f"{other}/dlami\n") == ([], "/dlami/cache")


def test_workers_spill_to_the_local_disk_if_there_is_one(tmp_path):
    (command,) = (line for line in read("cluster.yaml")["worker_start_ray_commands"] if "ray start" in line)
    command = command.replace("ulimit -n 65536; ", "").replace("/local", str(tmp_path / "local"))
    for there in (False, True):
        if there:
            (tmp_path / "local" / "spill").mkdir(parents=True)
        shown = run_with(tmp_path, command, {"ray": '#!/bin/sh\necho "$@"\n'}, RAY_HEAD_IP="10.0.0.1")
        assert (b"--object-spilling-directory" in shown) == there
        assert shown.startswith(b"start --address=10.0.0.1:6379 ")


def test_pods_with_gpus_tolerate_the_usual_taint_and_mount_the_documented_claim():
    pods = groups()[1]
    with_gpus = [pod for pod in pods[1:] if "nvidia.com/gpu" in pod["containers"][0]["resources"]["limits"]]
    assert with_gpus
    for pod in with_gpus:
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    claim = block("docs/guides/kubernetes.md", "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    names = {pod["volumes"][0]["persistentVolumeClaim"]["claimName"] for pod in pods}
    assert names == {claim["metadata"]["name"]}


@pytest.mark.slow
@pytest.mark.parametrize("script", ["pipeline/prepare.py", "trainer/train.py"])
def test_scripts_run_from_the_home_folder(script, tmp_path):
    """As `ray submit` runs them: the file alone, copied home, with the package installed elsewhere."""
    config = {"prepare": "configs/openwebtext.yaml", "train": "configs/declutr-base.yaml"}
    copied, name = shutil.copy(ROOT / script, tmp_path), Path(script).stem
    here = {"folder": tmp_path, "env": {"PYTHONWARNINGS": "ignore"}}
    assert run_python(copied, config[name], "--print-config", **here).stdout
    missing = run_python(copied, "configs/nowhere.yaml", check=False, **here)
    assert missing.returncode == 1
    assert str(tmp_path / "configs" / "nowhere.yaml") in missing.stderr
