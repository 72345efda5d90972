"""Pairs of a dataset of the hub, such as SNLI with the columns premise, hypothesis and a number as label."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hubserver import hub_server
from messages import says

ROOT = Path(__file__).resolve().parents[3]
READ = """
import json, sys
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.job.units import plan_units, read_unit
for content in json.loads(sys.argv[1]):
    config = PipelineConfig.model_validate({"output": "o", "corpus": {"kind": "hub", "name": "owner/nli"},
        "tokenizer": {"kind": "train", "vocab_size": 300}, "content": content})
    units, problems = plan_units(config.corpus, 32, None, config.content)
    records = [r for unit in units for r in read_unit(unit, config.corpus, config.content)] if not problems else []
    rows = [[r.texts, r.labels] if hasattr(r, "texts") else r.reason for r in records]
    print(json.dumps(rows or problems))
"""


def test_pairs_of_the_hub_are_grouped_by_premise(tmp_path):
    table = {
        "premise": ["a", "b", "a", "a"],
        "hypothesis": ["x", "y", "z", "?"],
        "label": pa.array([0, 1, 2, -1], pa.int64()),
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    files = {"data/train-00000-of-00001.parquet": (tmp_path / "a.parquet").read_bytes()}
    with hub_server({"owner/nli": {"main": files}}) as address:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
        home = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "PYTHONPATH": paths, "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"} | home
        asked = json.dumps(["pairs", {"kind": "pairs", "premise": "sentence1"}])
        ran = subprocess.run(
            [sys.executable, "-c", READ, asked], env=environment, capture_output=True, text=True, check=False
        )
    assert ran.returncode == 0, ran.stderr
    found, (problem,) = (json.loads(line) for line in ran.stdout.splitlines())
    assert found == ["no_gold_label", [["a", "x", "z"], [-1, 0, 2]], [["b", "y"], [-1, 1]]]
    says(problem, "'sentence1'", "['hypothesis', 'label', 'premise']", "content.premise")
