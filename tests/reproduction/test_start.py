"""The encoder to start from as the item scores it: with the pooling of its runs and, as they, without a prompt."""

import pytest
import yaml
from folders import encoder_folder
from papers import arguments, write_item

from declutr.cli.reproduce import run
from declutr.reproduction.item import load_item
from declutr.reproduction.plan import plan_item


def starting(folder, axis):
    """An item with a start, whose runs differ in these settings."""
    values = yaml.safe_load(write_item(folder).read_text()) | {"printed": {}, "axes": {"axis": axis}}
    scale = values["scales"]["tiny"]
    scale["settings"], scale["start"] = {"encoder": {"pretrained": "$DECLUTR_START"}}, {"config": scale["config"]}
    (folder / "terms.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return folder / "terms.yaml"


def start_folder(folder, **options):
    (folder / "start").mkdir()
    return encoder_folder(folder / "start", "bert", pooling="cls", **options)


@pytest.mark.parametrize("only", [[], ["start"]])
@pytest.mark.parametrize(
    ("pooling", "expected"), [(["mean", "mean"], "mean"), (["max", "max"], "max"), (["mean", "cls"], None)]
)
def test_start_is_scored_with_the_pooling_that_all_runs_share(tmp_path, only, pooling, expected):
    axis = {label: {"encoder.pooling": each} for label, each in zip("ab", pooling, strict=True)}
    item, start = starting(tmp_path, axis), start_folder(tmp_path)
    places = (tmp_path / "data", tmp_path / "data", tmp_path / "work")
    first, *_ = plan_item("terms", load_item(str(item)), "tiny", *places, {}, None, start, only).runs
    assert (first.cell.name, first.cell.encoder.name, first.cell.encoder.pooling) == ("start", str(start), expected)


def test_start_with_a_prompt_is_refused(tmp_path, capsys):
    item = starting(tmp_path, {"a": {}, "b": {"optim.lr": 0.5}})
    start = start_folder(tmp_path, prompts={"query": "find: "}, default_prompt_name="query")
    assert run(arguments(item, tmp_path / "work", "--plan", "--start", str(start))) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"--start {start}: puts 'find: ' before each text" in line
