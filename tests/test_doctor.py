"""The doctor on this machine as it is, on folders that are really broken, and on values beyond the limits."""

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest
import tinyruns as runs
from mediafiles import png
from messages import says
from preparing import prepare_media
from transformers import AutoTokenizer
from volumes import small_volume

from declutr import doctor
from declutr.cli.main import main
from declutr.doctor import Finding, Needs
from declutr.trainer.build import build_encoder
from declutr.trainer.driver.checks import resolve

NEEDS = Needs(10**8, checkpoint_bytes=12 * 10**8, disk_bytes=36 * 10**8, memory_mib=6100, workers=4, device="auto")


def only(findings, name):
    (finding,) = [finding for finding in findings if finding.name.endswith(name)]
    return finding


@pytest.mark.slow
def test_doctor_on_this_machine_finds_every_kind_and_leaves_nothing_behind(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    status = main(["doctor", "--path", str(tmp_path / "run"), "--json"])
    report = json.loads(capsys.readouterr().out)
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert {"versions", "GPUs", "memory", "ports open to others", f"{tmp_path}/run space"} <= set(findings)
    assert findings["versions"]["status"] == findings[f"{tmp_path}/run rename"]["status"] == "ok"
    assert findings[f"{tmp_path}/run lock"]["value"] == "exclusive"
    says(findings[f"{tmp_path}/run writable"]["value"], f"{tmp_path},", "4 KiB")
    says(findings["cluster"]["value"], "10.0.0.1:6379: only this node", "`ray status`")
    assert status == int(report["counts"]["FAIL"] > 0)
    assert sum(report["counts"].values()) == len(report["findings"])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RAY_ADDRESS", "")  # Ray itself takes it for none
    main(["doctor", "--path", str(tmp_path / "run")])
    lines = capsys.readouterr().out.splitlines()  # other programs may have opened ports since the first call
    assert not [line for line in lines if "only this node is checked" in line]
    assert lines[-1].startswith(f"{sum(line.startswith('ok ') for line in lines)} ok, ")


def test_text_names_the_remedy_of_what_is_broken_only():
    assert Finding("a", "ok", "1").line() == "ok    a: 1"
    assert Finding("b", "FAIL", "2", "3", "mend it").line() == "FAIL  b: 2 (3)\n      -> mend it"
    assert doctor.judge("b", "2", remedy="mend it").line() == "ok    b: 2"


def test_a_run_that_train_refuses_fails(tmp_path, capsys):
    values = runs.train_values(tmp_path / "nothing", tmp_path / "run")
    assert main(["doctor", str(runs.write_config(tmp_path / "train.yaml", train=values))]) == 1
    output = capsys.readouterr().out
    says(output, "FAIL  configuration: ", "nothing: no such folder")
    says(output, "-> correct the setting")


def test_needs_of_a_run_are_those_of_its_encoder_and_checkpoints(tmp_path):
    runs.word_shards(tmp_path / "data", rows=12)
    projection = {"encoder": {"projection": {"kind": "mlp", "size": 8}}, "checkpoint": {"keep_last": 2}}
    config = runs.train_config(tmp_path / "data", tmp_path / "run", **projection)
    run = resolve(config)
    needs = doctor.needs_of(run, 3)
    encoder = build_encoder(config, AutoTokenizer.from_pretrained(tmp_path / "data" / "tokenizer"))
    assert needs.parameters == sum(parameter.numel() for parameter in encoder.parameters())
    assert needs.checkpoint_bytes == 12 * needs.parameters
    assert needs.memory_mib == 3 * (16 * needs.parameters >> 20)  # weights, gradients, moments
    milestones = {"checkpoint": {"every_steps": 2, "keep_last": 2, "keep_every_steps": 4}}
    steps, epochs = milestones | {"steps": 19}, milestones | {"steps": None, "epochs": 12}
    best, last = steps | {"validation": {"every_steps": 2}}, {"checkpoint": {"keep_last": 2}}
    for changes, number in ((last, 3), (steps, 2 + 4 + 1), (epochs, 2 + 12 * 12 // 8 // 4 + 1), (best, 2 + 4 + 1 + 1)):
        config = runs.train_config(tmp_path / "data", tmp_path / "run", **changes)
        needs = doctor.needs_of(dataclasses.replace(run, config=config), 1)
        assert needs.disk_bytes == needs.checkpoint_bytes * number


def test_needs_count_the_tasks_of_a_run(tmp_path):
    runs.word_shards(tmp_path / "data", rows=12)
    folder, _ = prepare_media(tmp_path / "images", "images", {f"{'ab'[n % 2]}/{n}.png": png(n) for n in range(40)})
    frontend = {"image_size": 16, "patch_size": [8, 8]}
    tasks = {"image": {"data": str(folder), "objective": {"kind": "supcon"}, "frontend": frontend}}

    def needs_with(**changes):
        return doctor.needs_of(resolve(runs.train_config(tmp_path / "data", tmp_path / "run", **changes)), 1)

    alone = needs_with().parameters
    joint, turns = (needs_with(auxiliary_tasks=tasks, task_schedule=kind) for kind in ("joint", "alternating"))
    width = runs.FROM_CONFIG["hidden_size"]
    own = (3 * 8 * 8 + 1) * width + (4 + 1) * width + width + (width + 1) * width
    assert joint.parameters == turns.parameters == alone + own
    assert joint.checkpoint_bytes == 12 * joint.parameters
    assert turns.checkpoint_bytes == joint.checkpoint_bytes + 8 * alone


def test_a_folder_or_address_that_works_is_ok_and_one_that_does_not_or_holds_a_secret_fails(tmp_path):
    for place, count in ((str(tmp_path), 4), (f"file://{tmp_path}", 1)):
        assert [finding.status for finding in doctor.check_folder(place, 1000)] == ["ok"] * count
        assert list(tmp_path.iterdir()) == []
    places = {"$UNKNOWN_HERE/run": "UNKNOWN_HERE", "nothing://x/run": "nothing", "s3://key:secret@x/y": "credentials"}
    places |= {__file__: f"{__file__} is a file; name a folder"}
    for place, reason in places.items():
        (finding,) = doctor.check_folder(place, 0)
        assert finding.status == "FAIL"
        says(finding.value, reason)


def test_a_disk_that_is_full_or_read_only_fails(tmp_path):
    with small_volume(tmp_path / "disk", size_mib=1) as volume:
        space = only(doctor.check_folder(str(volume.path), NEEDS.disk_bytes), "space")
        volume.fill()
        full = only(doctor.check_folder(str(volume.path), 0), "writable")
        volume.read_only(True)
        (finding,) = doctor.check_folder(str(volume.path / "run"), 0)
    assert space.status == finding.status == "FAIL"
    says(space.limit, "3.35 GiB", "checkpoints")
    says(full.value, "No space left")
    says(finding.value, "Read-only file system")


def test_a_torn_rename_and_a_lock_for_two_fail(tmp_path, monkeypatch):
    """A writer that truncates first, and a second process that asks for a shared lock of another file."""
    monkeypatch.setattr(type(tmp_path), "replace", lambda aside, target: shutil.copyfile(aside, target))
    monkeypatch.setattr(doctor, "_LOCK_AGAIN", "import sys; open(sys.argv[1])")
    findings = doctor.check_folder(str(tmp_path), 0)
    assert [only(findings, name).status for name in ("rename", "lock")] == ["FAIL", "FAIL"]


def test_gpus_that_are_few_or_busy_or_no_use_to_torch_are_named():
    free, busy = "NVIDIA A, 81559, 3, 0, 550.1\n", "NVIDIA A, 81559, 40000, 97, 550.1\n"

    def judged(answer, cuda="13.0", device="auto", workers=2):
        needs = Needs(1, 1, 1, 1, workers, device)
        return [(finding.name, finding.status) for finding in doctor.check_gpus(answer, "2.13", cuda, needs)]

    assert judged(free + free) == [("GPUs", "ok"), ("GPUs free", "ok")]
    assert judged(free) == [("GPUs", "warn"), ("GPUs free", "ok")]  # auto: too few, so CPUs would train
    assert judged(free, device="cuda")[0] == ("GPUs", "FAIL")
    assert judged("") == judged("", device="cpu") == [("GPUs", "ok")]
    assert judged("", device="cuda") == judged(None, device="cuda") == [("GPUs", "FAIL")]
    assert judged(None) == [("GPUs", "warn")]
    assert judged("NVIDIA GB, [N/A], [N/A], 0, 580\n", workers=1)[1] == ("GPUs free", "ok")
    findings = doctor.check_gpus(free + busy, "2.13+cpu", None, None)
    assert findings[0].value == "2 x NVIDIA A 81559 MiB, driver 550.1"
    torch = only(findings, "torch")
    assert torch.status == "FAIL"
    says(torch.value, "2.13+cpu is a build for CPUs")
    says(torch.remedy, "make setup TORCH=torch")
    assert only(findings, "free").value == "GPU 1: 40000 of 81559 MiB used, 97% busy"
    assert judged("A, 9, 3, 97, 1\n")[1] == judged("A, 9000, 4000, 0, 1\n")[1] == ("GPUs free", "warn")


@pytest.mark.parametrize(("free_mib", "status"), [(7000, "ok"), (6000, "warn"), (500, "FAIL")])
def test_memory_holds_the_workers_of_the_run(free_mib, status):
    total = 8000 if free_mib > 500 else 6099
    assert doctor.check_memory(total, free_mib, NEEDS).status == status
    assert doctor.check_memory(total, free_mib, None).status == "ok"


def test_versions_that_are_missing_or_too_old_are_named(tmp_path, monkeypatch):
    needs = "Requires-Dist: old>=2\nRequires-Dist: gone\nRequires-Dist: extra-only; extra == 'x'\n"
    for name, version, more in (("declutr_ray", "0", needs), ("old", "1.9", "")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # packages that this process finds first
    wrong = "old>=2 is needed, 1.9 is installed; gone is needed, nothing is installed"
    assert (doctor.check_versions().status, doctor.check_versions().value) == ("FAIL", wrong)
    shutil.rmtree(tmp_path / "declutr_ray-0.dist-info")
    assert doctor.check_versions().value == "declutr-ray is not installed"


GCS, DASHBOARD, CLIENT = ("gcs", "::", 6379), ("dashboard", "0.0.0.0", 8265), ("Ray client", "0.0.0.0", 10001)


@pytest.mark.parametrize(
    ("ports", "public", "guarded", "status"),
    [
        ([], False, True, "ok"),
        ([GCS], False, True, "ok"),  # within a private network
        ([GCS], True, True, "warn"),
        ([GCS], True, False, "FAIL"),
        ([("gcs", "10.0.0.3", 6379)], True, False, "ok"),
        ([DASHBOARD], False, False, "warn"),
        ([CLIENT], False, False, "warn"),
        (None, False, True, "warn"),
    ],
)
def test_ports_open_to_others_are_named(ports, public, guarded, status):
    finding = doctor.check_ports(ports, {"127.0.0.1", "10.0.0.3"} | ({"8.8.8.8"} if public else set()), guarded)
    assert finding.status == status
    if status == "FAIL":
        says(finding.value, "gcs :::6379", "8.8.8.8")


@pytest.mark.parametrize(("option", "kind"), [("", "dashboard"), ("--host=127.0.0.1", "metrics")])
def test_a_real_port_is_seen_with_its_process(option, kind):
    code = "import socket,sys; s=socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, "ray/dashboard/dashboard.py", option]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert (kind, "0.0.0.0", int(child.stdout.readline())) in doctor.ray_ports()
        finally:
            child.stdin.close()
