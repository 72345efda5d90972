"""What decides the scores of `declutr reproduce`: contents, however their paths are written."""

import json
import shutil
from pathlib import Path

import pytest
from folders import encoder_folder
from papers import changed, write_item
from prepared import Row, write_prepared
from tinyruns import GEOMETRY

from declutr.common.errors import UsageError
from declutr.evaluation.senteval.harness import VERSIONS
from declutr.reproduction.item import load_item
from declutr.reproduction.plan import ItemPlan, identity, made_from, run_ready


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An item, an encoder and shards in a folder that `~` and `$PLACE` name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLACE", str(tmp_path))
    write_item(tmp_path)
    (tmp_path / "encoder").mkdir()
    encoder_folder(tmp_path / "encoder", "bert")
    return tmp_path


def first_run(home, **keys):
    """Plan and first run of the item with other keys."""
    copy = changed(home / "terms.yaml", "changed", **keys)
    places = (home / "data", home / "data/senteval", home / "work")
    plan = ItemPlan("changed", load_item(str(copy)), "tiny", *places)
    return plan, plan.runs[0]


def encoder_identity(home, name):
    return identity(*first_run(home, axes={}, encoders={"a": {"name": name}}, scales={"tiny": {}}))


def write(path, text="other"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("name", ["encoder", "untrained:{}/encoder", "untrained@3:{}/encoder", "~/encoder"])
def test_encoder_of_other_files_has_other_scores(home, name):
    name = name.format(home) if "{}" in name or name[0] == "~" else str(home / name)
    before = encoder_identity(home, name)
    assert encoder_identity(home, name) == before
    write(home / "encoder/model.safetensors")
    assert encoder_identity(home, name) != before


def test_run_that_is_trained_further_has_other_scores_and_its_logs_decide_nothing(home):
    identities = [""]
    for file, decides in (
        ("checkpoints/step-00000002/encoder.pt", True),
        ("metrics.jsonl", False),
        ("checkpoints/step-00000001/encoder.pt", False),
        ("checkpoints/step-00000004/encoder.pt", True),
        ("export/model.safetensors", True),
        ("checkpoints/step-00000006/encoder.pt", False),
    ):
        write(home / "run" / file, file)
        identities.append(encoder_identity(home, str(home / "run")))
        assert (identities[-1] != identities[-2]) == decides, file
    assert len({*identities}) == 4


IMAGES = {"data": "shards", "objective": {"kind": "supcon"}, "frontend": {"pretrained": "$PLACE/encoder"}}


@pytest.mark.parametrize(
    ("settings", "file"),
    [
        ({"encoder": {"pretrained": "~/encoder"}}, "encoder/model.safetensors"),
        ({"auxiliary_tasks": {"image": IMAGES}}, "encoder/model.safetensors"),
        ({"validation.stsb": "~/pairs"}, "pairs/sts-dev.csv"),
        ({"validation.sickr": "${PLACE}/pairs"}, "pairs/SICK_trial.txt"),
        *[({key: "~/seen"}, "seen") for key in ("data", "validation.data")],
    ],
)
def test_run_of_other_encoders_pairs_or_shards_has_other_scores_and_is_refused(home, settings, file):
    def write_seen(word):
        shutil.rmtree(home / "seen", ignore_errors=True)
        write_prepared(home / "seen", [[Row(f"{word} words {n} " * 40) for n in range(96)]], geometry=GEOMETRY)

    write_seen("first")
    for name in ("sts-dev.csv", "SICK_trial.txt"):
        write(home / "pairs" / name, "pairs")
    scale = {"settings": settings}
    plan, run = first_run(home, scale=scale)
    before, record = identity(plan, run), Path(f"{run.config.run}.made_from.json")
    write(record, json.dumps(made_from(run.config)))
    assert identity(*first_run(home, scale=scale)) == before
    write_seen("second") if file == "seen" else write(home / file)
    assert identity(plan, run) != before
    with pytest.raises(UsageError, match="was trained with other settings or data"):
        run_ready(run.config)
    shutil.rmtree(home / file.partition("/")[0])  # what is not there now is not compared: it may be made again
    assert not run_ready(run.config)


def test_other_methods_and_classifiers_give_other_scores(home, monkeypatch):
    seen = {identity(*first_run(home)), identity(*first_run(home, scale={"preset": "prototyping"}))}
    monkeypatch.setitem(VERSIONS, "cosine", VERSIONS["cosine"] + 1)
    assert len({*seen, identity(*first_run(home))}) == 3
