"""`declutr inspect RUN`: its checkpoints, whether each is whole, and why it is kept."""

import json
import os
import shutil
import time

import pytest
import torch
import yaml
from messages import says

from declutr.cli.main import main
from declutr.inspection.describe import CheckpointRow, _table
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.state import RunState


@pytest.fixture
def saved_run(tmp_path):
    settings = {
        "run": "r",
        "data": "d",
        "encoder": {"from_config": {"model_type": "roberta"}},
        "checkpoint": {"every_steps": 2, "keep_last": 2, "keep_every_steps": 4},
        "validation": {"every_steps": 2, "score": "mrr"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    for step, score in ((2, 0.75), (4, 0.5), (6, None), (8, 0.25)):
        state = RunState(
            step=step,
            documents=1000 * step,
            world_size=3,
            config_hash="c",
            data_hash="d",
            scores={} if score is None else {"mrr": score},
            files={},
            skipped=step // 8,
        )
        contents = {"encoder.safetensors": {"weight": torch.ones(2**18)}}
        checkpoint.save(tmp_path / "checkpoints", state, contents)
    return tmp_path


def test_every_checkpoint_has_a_line_and_folders_of_no_run_are_refused(saved_run, capsys, tmp_path):
    assert main(["inspect", str(saved_run)]) == 0
    first, head, *lines, last = capsys.readouterr().out.splitlines()
    assert (first, last) == (f"Run in {saved_run}: 0 steps logged", "  not exported yet")
    assert head.split()[:3] == ["step", "documents", "age"]
    assert [line.split()[0] for line in lines] == ["2", "4", "6", "8"]
    assert "best" in lines[0]
    assert "mrr 0.7500" in lines[0]
    assert "every" in lines[1]
    assert "last, every" in lines[3]
    assert "8,000" in lines[3]
    assert "1 steps skipped" in lines[3]
    assert all("verified" in line and " 1.0 " in line for line in lines)
    (tmp_path / "file").write_text("")
    for place, *options in ((tmp_path / "file",), (tmp_path / "gone", "--json"), (saved_run / "checkpoints", "--fast")):
        assert main(["inspect", str(place), *options]) == 1
        says(capsys.readouterr().err, place, "run")
    for step in (saved_run / "checkpoints").iterdir():
        shutil.rmtree(step)
    assert main(["inspect", str(saved_run)]) == 0
    says(capsys.readouterr().out, "no checkpoint yet")


def test_checkpoints_json_and_status_tell_whether_the_newest_is_whole(saved_run, capsys):
    older = saved_run / "checkpoints" / "step-00000004" / "encoder.safetensors"
    raw = bytearray(older.read_bytes())
    raw[500] ^= 1
    older.write_bytes(raw)
    assert main(["inspect", str(saved_run), "--json"]) == 0, "the newest one is whole"
    found = json.loads(capsys.readouterr().out)
    assert [row["broken"] is None for row in found] == [True, False, True, True]
    says(found[1]["broken"], "encoder.safetensors", "altered", "checksum")
    assert [row["kept"] for row in found] == [["best"], [], ["last"], ["last", "every"]]
    assert found[0]["scores"] == {"mrr": 0.75}
    assert found[3]["world_size"] == 3
    assert found[3]["size_bytes"] > 2**20
    assert 0 <= found[3]["age_seconds"] < 600
    hours_ago = time.time() - 7200
    os.utime(saved_run / "checkpoints" / "step-00000002" / "encoder.safetensors", (hours_ago, hours_ago))
    main(["inspect", str(saved_run), "--json"])
    assert json.loads(capsys.readouterr().out)[0]["age_seconds"] < 600, "that of its newest file"
    main(["inspect", str(saved_run), "--json", "--fast"])
    assert not any(row["broken"] for row in json.loads(capsys.readouterr().out)), "its size is right"
    main(["inspect", str(saved_run), "--fast"])
    says(capsys.readouterr().out, "whole by its sizes")
    (saved_run / "checkpoints" / "step-00000008" / "state.json").unlink()
    assert main(["inspect", str(saved_run)]) == 1
    says(capsys.readouterr().out, "BROKEN", "state.json", "missing")


@pytest.mark.parametrize(
    ("seconds", "age"), [(59.0, "59 s"), (60.0, "1.0 min"), (3600.0, "1.0 h"), (86399.0, "24.0 h"), (86400.0, "1.0 d")]
)
def test_ages_and_sizes_have_the_unit_that_fits(seconds, age):
    _, line = _table([CheckpointRow(4, None, seconds, 10 * 2**20, 1000, 3, 0, {}, [])], "verified")
    assert line.split()[:2] == ["4", "1,000"]
    assert f" {age}      10.0 " in line
