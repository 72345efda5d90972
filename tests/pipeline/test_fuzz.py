"""A small run of the fuzzer of the readers; docs/evidence/reliability.md has the figures of a large one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INPUTS = 1500


@pytest.mark.slow
def test_damaged_files_of_every_kind_are_read_to_the_end():
    command = [sys.executable, str(ROOT / "tests" / "fuzz" / "readers.py"), "--inputs", str(INPUTS), "--seed", "1"]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    result = json.loads(ran.stdout)
    assert result["errors"] == []
    assert sum(result["kinds"].values()) == INPUTS
    assert result["records"]["document"] > INPUTS
    assert result["records"]["unreadable"] > INPUTS / 10
    assert result["peak_mib"] < 1500
