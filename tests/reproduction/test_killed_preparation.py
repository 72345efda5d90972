"""`declutr reproduce` killed while another command prepares its shards, with Ray."""

import json
import subprocess
import sys

import pytest
import yaml
from papers import arguments, write_item
from tinyruns import descendants, prepare_values, wait_gone, write_corpus
from waiting import until


@pytest.mark.ray
def test_kill_while_shards_are_prepared_ends_all_and_the_same_command_finishes(tmp_path):
    item, work = write_item(tmp_path), tmp_path / "work"
    write_corpus(tmp_path / "data/corpus.jsonl")
    prepare = prepare_values("$DECLUTR_DATA/corpus.jsonl", "unused")
    (tmp_path / "prepare.yaml").write_text(yaml.safe_dump({"prepare": prepare}))
    values = yaml.safe_load(item.read_text()) | {"axes": {"run": {"one": {}}}, "printed": {}}
    scale = values["scales"]["tiny"]
    scale["settings"] = {"data": "$DECLUTR_WORK/shards/documents"}
    scale["shards"] = {"documents": {"config": str(tmp_path / "prepare.yaml")}}
    item.write_text(yaml.safe_dump(values, sort_keys=False))
    command = [sys.executable, "-m", "declutr.cli.main", "reproduce", *arguments(item, work, "--seeds", "0")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until((work / "shards/documents/lock.json").is_file, "the lock of the preparation", 120)
    started = {pid: title for pid, title in descendants(process.pid).items() if "declutr.cli.main" in title}
    assert len(started) == 3, "a process that works, and two that prepare"
    process.kill()
    process.communicate()
    assert wait_gone(started, 10) == {}
    again = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    found = json.loads((work / "terms-tiny/results-part.json").read_text())
    assert list(found["numbers"]["STS-B"]) == ["one"]
