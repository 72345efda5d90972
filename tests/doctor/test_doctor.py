"""The doctor on this machine as it is, on folders that are really broken, and on facts that were edited."""

import dataclasses
import json
import shutil
import socket
import subprocess
import sys

import pytest
import tinyruns as runs
from mediafiles import png
from mediashards import prepare_media
from messages import says
from prepared import Row, write_prepared
from transformers import AutoTokenizer

from declutr.doctor import checks, collective, data, examination, facts, network, storage
from declutr.doctor.cluster import Examiner, probe
from declutr.doctor.facts import Gpu
from declutr.doctor.finding import Finding, as_text, counts
from declutr.doctor.needs import Needs, needs_of
from declutr.doctor.network import Exposure, ListeningPort
from declutr.trainer.setup.build import build_encoder

NEEDS = Needs(
    parameters=100_000_000,
    optimized=100_000_000,
    checkpoints=3,
    workers=4,
    cpus_per_worker=2,
    data_cpus=2,
    gpus=0,
    wishes_gpus=True,
)


@pytest.fixture(scope="module")
def here():
    """The facts of this machine."""
    return facts.gather()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one MiB, which may be made read-only."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


def one(found, name):
    """The only finding with that in its name."""
    (finding,) = [finding for finding in found if name in finding.name]
    return finding


def edited(here, **changes):
    return dataclasses.replace(here, **changes)


@pytest.mark.slow
def test_examine_this_machine_finds_every_kind(tmp_path, capsys):
    """The real command, alone: every kind of fact is there, two processes really sum, nothing is left behind."""
    status = examination.main(["--path", str(tmp_path / "run"), "--address", "local", "--json"])
    shown = json.loads(capsys.readouterr().out)
    found = {finding["name"]: finding for finding in shown["findings"]}
    assert found["all-reduce (gloo)"]["value"].startswith("2 processes")
    assert found["version of python"]["status"] == "ok"
    assert found[f"{tmp_path}/run writable"]["value"] == str(tmp_path)
    assert {"memory", "/dev/shm", "open files", "GPUs", "ports open to others"} <= set(found)
    assert status == int(shown["counts"]["FAIL"] > 0)
    assert sum(shown["counts"].values()) == len(shown["findings"])
    assert list(tmp_path.iterdir()) == []


def test_text_names_the_remedy_of_what_is_broken_only():
    text = as_text([Finding("a", "n1", "ok", "1"), Finding("b", "node2", "FAIL", "2", "3", "mend it")])
    assert text.splitlines() == [
        "ok    n1     a: 1",
        "FAIL  node2  b: 2 (3)",
        "        -> mend it",
        "1 ok, 0 to check (warn), 1 to fix (FAIL)",
    ]


def test_examine_of_a_run_that_train_refuses_fails(tmp_path):
    config = runs.train_config(tmp_path / "nothing", tmp_path / "run")
    found = examination.examine(config, "127.0.0.1:1", [])[0]
    assert (found.name, found.status) == ("configuration", "FAIL")
    says(found.value, "no manifest.json")


def test_examine_of_a_run_that_fits_counts_its_needs(tmp_path):
    """Its needs are counted without weights, and are those of the encoder that will be built."""
    texts = [" ".join(f"word{(3 * row + place) % 50}" for place in range(90)) for row in range(12)]
    write_prepared(tmp_path / "data", [[Row(text) for text in texts]], geometry=runs.GEOMETRY)
    projection = {"encoder": {"projection": {"kind": "mlp", "size": 8}}, "checkpoint": {"keep_last": 2}}
    config = runs.train_config(tmp_path / "data", tmp_path / "run", **projection)
    found = examination.examine(config, "127.0.0.1:1", [])[0]
    assert (found.name, found.status) == ("configuration", "ok")
    needs = needs_of(config)
    encoder = build_encoder(config, AutoTokenizer.from_pretrained(tmp_path / "data" / "tokenizer"))
    assert needs.parameters == sum(parameter.numel() for parameter in encoder.parameters())
    assert needs.checkpoints == 3
    milestones = {"checkpoint": {"every_steps": 2, "keep_last": 2, "keep_every_steps": 4}}
    for changes, number in (
        ({"steps": 19}, 2 + 4 + 1),
        ({"steps": None, "epochs": 12}, 2 + 12 * 12 // 8 // 4 + 1),
        ({"steps": 19, "validation": {"every_steps": 2}}, 2 + 4 + 1 + 1),
    ):
        config = runs.train_config(tmp_path / "data", tmp_path / "run", **milestones | changes)
        assert needs_of(config).checkpoints == number
    seen = data.look(str(tmp_path / "data"))
    assert (seen.documents, seen.error) == (12, "")
    assert data.check("d", {"n1": seen})[0].status == "ok"


def test_needs_count_the_tasks_of_a_run(tmp_path):
    """Frontends and heads, and an optimizer for each turn."""
    texts = [" ".join(f"word{(3 * row + place) % 50}" for place in range(90)) for row in range(12)]
    write_prepared(tmp_path / "data", [[Row(text) for text in texts]], geometry=runs.GEOMETRY)
    folder, _ = prepare_media(tmp_path / "images", "images", {f"{'ab'[n % 2]}/{n}.png": png(n) for n in range(4)})
    task = {
        "data": str(folder),
        "objective": {"kind": "supcon"},
        "frontend": {"image_size": 16, "patch_size": [8, 8]},
    }
    found = {}
    for turns in ("joint", "alternating"):
        config = runs.train_config(
            tmp_path / "data", tmp_path / "run", auxiliary_tasks={"image": task}, task_schedule=turns
        )
        found[turns] = needs_of(config)
    alone = needs_of(runs.train_config(tmp_path / "data", tmp_path / "run"))
    width = runs.FROM_CONFIG["hidden_size"]
    own = (3 * 8 * 8 + 1) * width + (4 + 1) * width + width + (width + 1) * width
    assert found["joint"].parameters == found["alternating"].parameters == alone.parameters + own
    assert found["joint"].optimized == alone.parameters + own
    assert found["alternating"].optimized == 2 * alone.parameters + own
    assert found["joint"].checkpoint_bytes == 12 * found["joint"].parameters


def test_needs_are_what_a_checkpoint_takes():
    assert NEEDS.disk_bytes == 100_000_000 * 12 * 3
    assert NEEDS.worker_bytes == 100_000_000 * (4 + 4 + 8)  # weights, gradients, moments
    assert NEEDS.cpus == 10


def test_a_folder_of_each_nodes_own_is_not_shared(tmp_path):
    """Two nodes, the same name for two disks."""
    folders = {node: tmp_path / node for node in ("n1", "n2")}
    for node, folder in folders.items():
        folder.mkdir()
        assert storage.write(str(folder), ".mark", node).error == ""
    unseen = {node: storage.seen(str(folder), ".mark", ["n1", "n2"], 0.2) for node, folder in folders.items()}
    found = storage.check_shared("/shared", unseen)
    assert (found.status, found.value.count("n1"), found.value.count("n2")) == ("FAIL", 2, 2)
    says(found.remedy, "shared file system")


def test_storage_of_a_shared_folder_or_address_is_ok(tmp_path):
    for place in (str(tmp_path), f"file://{tmp_path}"):
        written = {node: storage.write(place, ".mark", node) for node in ("n1", "n2/b")}
        unseen = {node: storage.seen(place, ".mark", ["n1", "n2/b"], 1.0) for node in written}
        assert storage.check_shared(place, unseen).status == "ok"
        assert counts(storage.check(place, written, 1000))["FAIL"] == 0
        for node in written:
            storage.clear(place, ".mark", node)
        assert list(tmp_path.iterdir()) == []


def test_disk_that_is_full_or_read_only_is_found(small_disk):
    written = {"n1": storage.write(str(small_disk), ".mark", "n1")}
    space = one(storage.check("run", written, NEEDS.disk_bytes), "space")
    assert space.status == "FAIL"
    says(space.limit, "3.35 GiB", "checkpoints")
    storage.clear(str(small_disk), ".mark", "n1")
    (small_disk / "fill").write_bytes(b"0" * (2**20 - 4096))
    assert "No space left" in storage.write(str(small_disk), ".mark", "n1").error
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    found = one(storage.check("run", {"n1": storage.write(str(small_disk), ".other", "n1")}, 0), "writable")
    assert found.status == "FAIL"
    says(found.value, "Read-only file system")


def test_small_shm_and_full_session_disk_are_found(small_disk, monkeypatch):
    monkeypatch.setattr(facts, "_folders", lambda: (str(small_disk / "session"), str(small_disk)))
    found = facts.gather()
    assert found.shm_mib == 1
    assert checks.object_store("n1", found, 100).status == "warn"
    assert checks.session_disk("n1", found).status == "ok"
    (small_disk / "fill").write_bytes(b"0" * (2**20 - 4096))
    assert checks.session_disk("n1", facts.gather()).status == "FAIL"


def test_folder_missing_on_a_node_is_found(tmp_path):
    assert storage.standing(str(tmp_path / "a" / "b")) == str(tmp_path)
    assert "does not exist" in storage.write(str(tmp_path / "gone"), ".mark", "n1").error
    assert "UNKNOWN_HERE" in storage.write("$UNKNOWN_HERE/run", ".mark", "n1").error
    assert "UNKNOWN_HERE" in data.look("$UNKNOWN_HERE/data").error


def test_slow_disk_and_torn_rename_are_found():
    found = storage.check("run", {"n1": storage.Written("run", "", 2**40, 250.0, 3)}, 1)
    assert one(found, "fsync").status == "warn"
    assert one(found, "rename").status == "FAIL"


def test_versions_and_settings_that_differ_are_named_with_their_nodes(here):
    other = edited(
        here, versions=here.versions | {"ray": "2.59.0", "CUDA driver": "1"}, settings={"NCCL_DEBUG": "INFO"}
    )
    nodes = {"n1": edited(here, settings={}), "n2": other, "n3": edited(here, settings={})}
    found = checks.versions(nodes)
    assert one(found, "version of ray").status == "FAIL"
    assert one(found, "version of ray").value == f"{here.versions['ray']} on n1, n3; 2.59.0 on n2"
    assert one(found, "driver").status == "warn"
    assert one(found, "version of torch").status == "ok"
    (setting,) = checks.settings(nodes)
    assert (setting.name, setting.status, setting.value) == ("NCCL_DEBUG", "warn", "(not set) on n1, n3; INFO on n2")
    assert [f.status for f in checks.settings({"n1": here, "n2": here})] == ["ok"]
    absent = edited(here, versions={"ray": "not installed"})
    assert one(checks.versions({"n1": absent, "n2": absent}), "version of ray").status == "FAIL"


def test_a_secret_in_the_environment_is_not_shown():
    shown = facts.settings({"RAY_AUTH_TOKEN": "hunter2", "RAY_X": "1", "HOME": "/", "RAY_NODE_ID": "f"})
    assert shown.keys() == {"RAY_AUTH_TOKEN", "RAY_X"}
    assert "hunter2" not in str(shown)


def test_the_code_itself_is_compared(tmp_path):
    for package in ("common", "pipeline", "trainer", "doctor"):
        shutil.copytree(
            runs.ROOT / "src" / "declutr" / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    assert facts.code_hash(tmp_path) == facts.code_hash(runs.ROOT / "src" / "declutr")
    with (tmp_path / "trainer" / "data" / "plan.py").open("a") as stream:
        stream.write("# another line\n")
    assert facts.code_hash(tmp_path) != facts.code_hash(runs.ROOT / "src" / "declutr")


def test_gpus_that_differ_or_are_busy_are_found(here):
    listed, driver = facts.parse_smi("NVIDIA A, 81559, 3, 0, 550.1\nNVIDIA A, 81559, 40000, 97, 550.1\n")
    assert driver == "550.1"
    assert listed[1] == Gpu("NVIDIA A", 81559, 40000, 97)
    assert facts.parse_smi("NVIDIA GB, [N/A], [N/A], 0, 580\n")[0] == (Gpu("NVIDIA GB", 0, 0, 0),)
    nodes = {"n1": edited(here, gpus=listed), "n2": edited(here, gpus=())}
    found = checks.gpus(nodes, dataclasses.replace(NEEDS, gpus=4))
    assert (found[0].status, found[0].value) == ("FAIL", "2 x NVIDIA A 81559 MiB on n1; none on n2")
    busy = one(found, "GPUs free")
    assert (busy.node, busy.status) == ("n1", "warn")
    assert busy.value == "GPU 1: 40000 of 81559 MiB used, 97% busy"
    assert checks.gpus(nodes, NEEDS)[0].status == "warn"  # auto: too few, so CPUs would train
    assert checks.gpus({"n2": edited(here, gpus=())}, NEEDS)[0].status == "ok"
    enough = {node: edited(here, gpus=(Gpu("NVIDIA A", 81559, 3, 0),) * 2) for node in ("n1", "n2")}
    with_cuda = {node: edited(one, versions=here.versions | {"CUDA of torch": "13.0"}) for node, one in enough.items()}
    assert [finding.status for finding in checks.gpus(with_cuda, NEEDS)] == ["ok", "ok", "ok"]  # one per worker
    without = {"n1": edited(with_cuda["n1"], versions=here.versions | {"CUDA of torch": "None"})}
    finding = one(checks.gpus(without, NEEDS), "torch")
    assert finding.status == "FAIL"
    says(finding.value, "build for CPUs")


@pytest.mark.parametrize(("used_mib", "busy_percent", "status"), [(40000, 0, "warn"), (3, 97, "warn"), (3, 0, "ok")])
def test_a_gpu_is_in_use_by_its_memory_or_its_work(here, used_mib, busy_percent, status):
    nodes = {"n1": edited(here, gpus=(Gpu("NVIDIA A", 81559, used_mib, busy_percent),))}
    assert one(checks.gpus(nodes, None), "GPUs free").status == status


@pytest.mark.parametrize(
    ("cpus", "own_session", "status"),
    [
        ({"n1": 8.0, "n2": 2.0}, False, "ok"),
        ({"n1": 8.0, "n2": 1.0}, False, "FAIL"),  # 9 of 10
        ({f"n{number}": 1.0 for number in range(12)}, False, "FAIL"),  # 12, but no node holds a worker
        ({"here": 2.0}, True, "warn"),  # the session declares what it needs
    ],
)
def test_cpus_too_few_for_the_workers_are_found(cpus, own_session, status):
    assert checks.cpus(cpus, NEEDS, own_session).status == status


def test_limits_of_a_node_that_are_too_low_are_found(here):
    assert checks.open_files("n", edited(here, open_files=256)).status == "FAIL"
    assert checks.open_files("n", edited(here, open_files=4096)).status == "warn"
    assert checks.open_files("n", edited(here, open_files=-1)).status == "ok"
    assert checks.memory("n", edited(here, ram_mib=4000, ram_free_mib=4000), NEEDS, 2).status == "ok"
    assert checks.memory("n", edited(here, ram_mib=4000, ram_free_mib=3000), NEEDS, 2).status == "warn"
    assert checks.memory("n", edited(here, ram_mib=4000, ram_free_mib=3000), NEEDS, 1).status == "FAIL"
    assert checks.memory("n", edited(here, ram_mib=4000, ram_free_mib=3000), NEEDS, 3).status == "warn"  # 2 on one
    assert checks.object_store("n", edited(here, shm_mib=99), 100).status == "warn"
    assert checks.object_store("n", edited(here, shm_mib=100), 100).status == "ok"
    for share, status in ((0.8, "ok"), (0.9, "warn"), (0.96, "FAIL")):
        assert checks.session_disk("n", edited(here, session_used_share=share)).status == status


@pytest.mark.parametrize(
    ("offset", "uncertain", "status"), [(0.1, 0.2, "ok"), (-3.0, 0.2, "warn"), (3.0, 4.0, "ok"), (900.0, 0.1, "FAIL")]
)
def test_clock_that_differs_is_found(offset, uncertain, status):
    assert checks.clock("n", offset, uncertain).status == status


CLOSED = Exposure((), ("127.0.0.1", "10.0.0.3"), "token", "/h/.ray/auth_token", 0o600, True)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "ok"),
        ({"listeners": (ListeningPort("gcs", "::", 6379),)}, "ok"),  # within a private network
        ({"listeners": (ListeningPort("gcs", "::", 6379),), "addresses": ("8.8.8.8",)}, "warn"),
        ({"listeners": (ListeningPort("gcs", "::", 6379),), "addresses": ("8.8.8.8",), "auth_mode": ""}, "FAIL"),
        ({"listeners": (ListeningPort("gcs", "10.0.0.3", 6379),), "addresses": ("8.8.8.8",), "auth_mode": ""}, "ok"),
        ({"listeners": (ListeningPort("dashboard", "0.0.0.0", 8265),), "auth_mode": ""}, "warn"),
        ({"listeners": (ListeningPort("Ray client", "0.0.0.0", 10001),), "auth_mode": ""}, "warn"),
        ({"listeners": None}, "warn"),
    ],
)
def test_ports_open_to_others_are_found(changes, status):
    assert network.check_ports("n", dataclasses.replace(CLOSED, **changes)).status == status


def test_a_real_port_is_seen_with_its_process():
    """A process that looks like Ray's dashboard, listening to all."""
    code = "import socket,sys; s=socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, "ray/dashboard/dashboard.py"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            port = int(child.stdout.readline())
            assert ListeningPort("dashboard", "0.0.0.0", port) in network.gather().listeners
        finally:
            child.stdin.close()


def test_token_that_is_missing_or_readable_is_found(tmp_path):
    home = {"HOME": str(tmp_path)}
    assert network.find_token(home) == ("", None, False)
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o644)
    for mode, expected in ((0o644, "FAIL"), (0o600, "ok")):
        token.chmod(mode)
        found = network.Exposure((), (), "token", *network.find_token(home))
        assert network.check_token("n", found).status == expected
    assert network.check_token("n", dataclasses.replace(CLOSED, token="")).status == "FAIL"
    assert network.check_token("n", dataclasses.replace(CLOSED, auth_mode="disabled")).status == "FAIL"
    assert network.find_token(home | {"RAY_AUTH_TOKEN": "secret"}) == ("RAY_AUTH_TOKEN", None, True)
    assert network.find_token(home | {"RAY_AUTH_TOKEN_PATH": str(token)})[0] == str(token)


def test_shards_that_differ_or_are_missing_are_found(tmp_path):
    says(data.look(str(tmp_path)).error, "no manifest.json")
    found = data.check("d", {"n1": data.Seen("aa", 5), "n2": data.Seen("bb", 5), "n3": data.Seen(error="gone")})
    assert [finding.status for finding in found] == ["FAIL", "FAIL"]
    assert data.check("d", {"n1": data.Seen("aa", 5), "n2": data.Seen("aa", 5)})[0].status == "ok"


def test_ports_that_others_cannot_reach_are_found():
    first = Examiner()
    port = first.listen()
    with socket.socket() as shut:
        shut.bind(("127.0.0.1", 0))  # bound, but nobody listens
        addresses = {"n1": ("127.0.0.1", port), "n2": ("127.0.0.1", shut.getsockname()[1])}
        assert list(probe(addresses)) == ["n2"]
    first.stop_listening()


def test_all_reduce_that_is_wrong_or_fails_is_found():
    good = collective.Summed(3.0, 0.01)
    assert collective.check("gloo", {"a": good, "b": good}).status == "ok"
    assert collective.check("gloo", {"a": good, "b": collective.Summed(error="refused")}).value == "b: refused"


def test_a_cluster_that_does_not_answer():
    with socket.socket() as shut:
        shut.bind(("127.0.0.1", 0))
        (found,) = examination.examine(None, f"127.0.0.1:{shut.getsockname()[1]}", [])
    assert (found.name, found.status) == ("cluster", "FAIL")
