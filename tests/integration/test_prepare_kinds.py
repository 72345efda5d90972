"""Pairs and images prepared for real, on Ray: planned, accounted for, shown, the same by command and by function."""

import json
import re

import pytest
import tinyruns as runs
import yaml
from corpora import tar
from mediafiles import picture, png, spread, stored
from messages import all_of, says
from preparing import checksums, values_of

from declutr.cli.main import main as declutr
from declutr.common.errors import ConfigError
from declutr.inspection.describe import describe
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.prepare import main, prepare
from declutr.pipeline.shards.shards import ShardSet, check_shards, load_manifest
from declutr.trainer.run import RunPlan, unknown

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("session")]
LABELS = ("entailment", "neutral", "contradiction")
SETTINGS = {
    "pairs": {
        "tokenizer": {"kind": "train", "vocab_size": 400, "sample_mib": 0.1},
        "content": {"kind": "pairs", "required_labels": ["entailment", "contradiction"]},
        "unit_mib": 0.02,
    },
    "images": {"content": {"kind": "images", "shortest_edge": 24}, "max_error_rate": 0.05, "unit_mib": 0.08},
}


def write_pairs(folder):
    """Three pairs a premise in four files; every tenth premise lacks a contradiction and has its entailment twice."""
    for file in range(4):
        lines = []
        for number in range(100 * file, 100 * (file + 1)):
            for place, label in enumerate(LABELS):
                lacking = number % 10 == 9 and label == "contradiction"
                pair = {
                    "premise": f"The premise with the number {number} is {number * 31 % 97} words long.",
                    "hypothesis": f"Its hypothesis {0 if lacking else place} is about number {number * 7 % 89}.",
                    "label": "entailment" if lacking else label if number % 2 else place,
                }
                lines.append(json.dumps(pair))
        lines += [json.dumps({"premise": "a", "hypothesis": "b", "label": "perhaps"})] * (file == 2)
        (folder / f"{file}.jsonl").write_text("\n".join(lines))
    (folder / "README.md").write_text("About these files.")


def write_images(folder):
    """90 images in class folders and in an archive with labels; six copies with other names, formats and labels."""
    files = {f"{'ab'[n % 2]}/{n:03}.png": png(n) for n in range(60)}
    files |= {f"copies/{n}.bmp": stored(picture(n), "BMP") for n in range(3)}
    members = [(f"{n}.{end}", data) for n in range(60, 90) for end, data in (("png", png(n)), ("cls", b"c"))]
    members += [(f"copy{n}.png", png(n)) for n in (3, 60, 61)] + [(f"copy{n}.cls", b"d") for n in (3, 60, 61)]
    spread(folder, files | {"more.tar": tar(sorted(members)), "a/broken.png": b"x", "notes.md": b"x"})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Of each kind its corpus, the folder of its shards and their manifest."""
    kinds = {}
    for kind, write in (("pairs", write_pairs), ("images", write_images)):
        folder = tmp_path_factory.mktemp(kind)
        (folder / "in").mkdir()
        write(folder / "in")
        config = PipelineConfig.model_validate(values_of(folder / "in", folder / "out", **SETTINGS[kind]))
        kinds[kind] = folder / "in", folder / "out", prepare(config)
    return kinds


def rows_of(folder):
    for split in ("train", "held-out"):
        shards = ShardSet(folder, split)
        yield shards.take(range(shards.num_documents)).to_pylist()


@pytest.mark.parametrize(
    ("kind", "dropped", "failed", "kept", "labels"),
    [
        ("pairs", {"lacks_contradiction": 40, "repeated_pair": 40}, {"unknown_label": 1}, 360,
         dict.fromkeys(sorted(LABELS), 360)),
        ("images", {"duplicate_other_label": 6}, {"not_an_image": 1}, 90, {"a": 30, "b": 30, "c": 30}),
    ],
)  # fmt: skip
def test_every_row_is_accounted_for(prepared, kind, dropped, failed, kept, labels):
    _, folder, manifest = prepared[kind]
    assert len(manifest.ledgers) >= 4
    assert (manifest.dropped, manifest.failed, manifest.labels) == (dropped, failed, labels)
    assert manifest.totals["read"] == kept + sum(dropped.values()) + 1
    assert sum(skip.files for skip in manifest.skipped.values()) == 1
    assert load_manifest(folder) == manifest
    assert check_shards(folder, full=True) == []
    assert not (folder / "rejected").exists()
    train, held_out = rows_of(folder)
    assert len({row["id"] for row in train + held_out}) == manifest.totals["kept"] == kept
    assert 0.05 < len(held_out) / kept < 0.4
    if kind == "pairs":
        assert all(row["labels"] == [-1, 0, 1, 2] for row in train)
        assert "perhaps" in manifest.failures[0].message
    else:
        assert manifest.notes == {"smaller": 90}
        assert not (folder / "tokenizer").exists()


def commanded(folder, kind, prepared, capsys):
    """What the command says of its plan, of its work, and what `inspect` says of the shards, which are the prepared."""
    corpus, before, _ = prepared[kind]
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"prepare": values_of(corpus, folder / "out", **SETTINGS[kind])}))
    outputs = []
    for options in (["--plan"], [], ["--verify-inputs"]):
        assert main([str(config), *options]) == 0
        outputs.append(capsys.readouterr().out)
    assert checksums(folder / "out") == checksums(before)
    return *outputs[:2], "\n".join(describe(folder / "out"))


def test_the_command_plans_reports_and_inspects_pairs(prepared, tmp_path, capsys):
    planned, done, shown = commanded(tmp_path, "pairs", prepared, capsys)
    assert "360 kept" in planned
    says(done, "441 rows read", "360 kept")
    says(done, "360 contradiction", "360 entailment", "360 neutral")
    says(shown, "rows of pairs", "360 contradiction")
    assert shown.count("    premise ") == shown.count("    neutral ") == 3
    assert "Spans" not in shown
    entry = next(line for line in shown.splitlines() if line.startswith("- row 0"))
    assert declutr(["inspect", str(tmp_path / "out"), "--document", entry.split("(")[1].partition(",")[0]]) == 0
    assert "    entailment " in capsys.readouterr().out


def test_the_command_plans_verifies_and_inspects_images(prepared, tmp_path, capsys):
    planned, done, shown = commanded(tmp_path, "images", prepared, capsys)
    assert re.search(r"images      about 9[67], of which about 96 kept", planned)
    assert "pixels" in planned
    assert "tokens" not in planned
    says(done, "97 images read", "90 kept")
    assert f"{90 * 32 * 24:,} pixels in" in done
    says(done, "3 labels", "90 smaller")
    says(shown, "images", "3 labels")


def test_shards_of_texts_leave_spans_at_their_defaults(prepared, tmp_path):
    values = runs.train_values(prepared["pairs"][1], tmp_path / "run")
    del values["spans"]
    before = runs.TrainConfig.model_validate(values)
    after = RunPlan.of(before).config
    assert after.spans == before.spans
    assert unknown(after) == []


def test_files_without_a_label_end_with_an_error(tmp_path):
    images = spread(tmp_path / "in", {f"{n}.png": png(n) for n in range(5)})
    with pytest.raises(ConfigError, match=all_of("none of 5 records", "images", "5 no_label", "content.label")):
        prepare(PipelineConfig.model_validate(values_of(images, tmp_path / "out", **SETTINGS["images"])))
