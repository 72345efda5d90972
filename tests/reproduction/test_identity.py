"""What decides scores: content of encoders, shards and judged pairs, however their paths are written."""

import json
import shutil

import pytest
import yaml
from folders import encoder_folder
from papers import write_item
from prepared import Row, write_prepared
from tinyruns import GEOMETRY

from declutr.evaluation.senteval.classifier.config import ClassifierConfig
from declutr.evaluation.senteval.runner.plan import VERSIONS
from declutr.reproduction.item import ReproduceError, load_item
from declutr.reproduction.plan import plan_item
from declutr.reproduction.readiness import MADE_FROM, made_from, refuse_other


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An item, an encoder and shards in a folder that `~` and `$PLACE` name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLACE", str(tmp_path))
    write_item(tmp_path)
    (tmp_path / "encoder").mkdir()
    encoder_folder(tmp_path / "encoder", "bert")
    return tmp_path


def plan(home, change, work="work"):
    """The plan of the item with the changed keys of its file."""
    values = yaml.safe_load((home / "terms.yaml").read_text()) | {"printed": {}} | change
    (home / "changed.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    places = (home / "data", home / "data" / "senteval", home / work)
    return plan_item("changed", load_item(str(home / "changed.yaml")), "tiny", *places, {}, None)


def encoders(home, name):
    """Identity of the scores of an encoder that is not trained."""
    made = plan(home, {"axes": {}, "encoders": {"a": {"name": name}}, "scales": {"tiny": {}}})
    return made.identity(made.runs[0])


def trained(home, settings):
    """Identity of the scores of a run with these settings."""
    scale = {"config": str(home / "train.yaml"), "settings": settings}
    made = plan(home, {"scales": {"tiny": scale}})
    return made.identity(made.runs[0])


def write(path, text="other"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "name", ["encoder", "untrained:{}/encoder", "untrained@3:{}/encoder", "~/encoder", "words.vec"]
)
def test_encoder_of_other_files_has_other_scores(home, name):
    name = name.format(home) if "{}" in name or name[0] == "~" else str(home / name)
    write(home / "words.vec", "a 1")
    before = encoders(home, name)
    assert encoders(home, name) == before
    write(home / ("words.vec" if name.endswith(".vec") else "encoder/model.safetensors"))
    assert encoders(home, name) != before


def test_run_that_is_trained_further_has_other_scores_and_its_logs_decide_nothing(home):
    run = home / "run"
    write(run / "checkpoints/step-00000002/encoder.pt", "2")
    write(run / "metrics.jsonl", "1")
    found = [encoders(home, str(run))]
    write(run / "metrics.jsonl")
    write(run / "checkpoints/step-00000001/encoder.pt")
    assert encoders(home, str(run)) == found[0]
    write(run / "checkpoints/step-00000004/encoder.pt", "4")
    found.append(encoders(home, str(run)))
    write(run / "export/model.safetensors", "4")
    found.append(encoders(home, str(run)))
    write(run / "checkpoints/step-00000006/encoder.pt", "6")
    assert encoders(home, str(run)) == found[-1]
    write(run / "export/model.safetensors", "6")
    assert len({*found, encoders(home, str(run))}) == 4


IMAGES = {"data": "shards", "objective": {"kind": "supcon"}, "frontend": {"pretrained": "$PLACE/encoder"}}


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"encoder": {"pretrained": "~/encoder"}}, "encoder/model.safetensors"),
        ({"auxiliary_tasks": {"image": IMAGES}}, "encoder/model.safetensors"),
        ({"validation.stsb": "~/data"}, "data/sts-dev.csv"),
        ({"validation.sickr": "${PLACE}/data"}, "data/SICK_trial.txt"),
    ],
)
def test_run_of_other_encoders_or_judged_pairs_has_other_scores_and_is_refused(home, settings, changed):
    write(home / "data/SICK_trial.txt", "pairs")
    before, scale = trained(home, settings), {"config": str(home / "train.yaml"), "settings": settings}
    first = plan(home, {"scales": {"tiny": scale}}).runs[0]
    write(first.folder / MADE_FROM, json.dumps(made_from(first.config)))
    assert trained(home, settings) == before
    write(home / changed)
    with pytest.raises(ReproduceError, match="was trained with another"):
        trained(home, settings)
    shutil.rmtree(first.folder)
    assert trained(home, settings) != before


@pytest.mark.parametrize("settings", [{"data": "~/seen"}, {"validation.data": "$PLACE/seen"}])
def test_run_of_other_shards_has_other_scores(home, settings):
    found = []
    for word in ("one", "other"):
        shutil.rmtree(home / "seen", ignore_errors=True)
        write_prepared(home / "seen", [[Row(f"{word} words {n} " * 40) for n in range(96)]], geometry=GEOMETRY)
        found.append(trained(home, settings))
    assert found[0] != found[1]


def test_what_is_not_there_now_refuses_no_run(home):
    """Shards and the start are made again before the runs are compared with them."""
    write(home / "run" / MADE_FROM, '{"start": "abc"}')
    refuse_other(home / "run", {"start": ""})
    with pytest.raises(ReproduceError, match="was trained with another start"):
        refuse_other(home / "run", {"start": "def"})


def test_other_methods_and_classifiers_give_other_scores(home, monkeypatch):
    found = [trained(home, {})]
    monkeypatch.setitem(VERSIONS, "cosine", VERSIONS["cosine"] + 1)
    found.append(trained(home, {}))
    scale = {"config": str(home / "train.yaml"), "settings": {}, "preset": "prototyping"}
    made = plan(home, {"scales": {"tiny": scale}})
    assert len({*found, made.identity(made.runs[0])}) == 3
    assert made.classifier == ClassifierConfig.prototyping()
