"""Images and sounds prepared for real, on Ray: accounted for, without copies, continued after a kill, refused."""

import io
import re

import numpy as np
import pytest
import soundfile
import tinyruns as runs
import yaml
from mediafiles import picture, png, spread, stored, tar_of
from messages import says
from preparing import checksums, values_of

from declutr.inspection.describe import describe
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.job.units import plan_units, read_unit
from declutr.pipeline.prepare import main, prepare
from declutr.pipeline.shards.shards import ShardSet, check_shards, load_manifest
from declutr.trainer.driver.checks import problems

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("session")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """90 images in class folders and in an archive with labels; six copies with other names, formats and labels."""
    files = {f"{'ab'[n % 2]}/{n:03}.png": png(n) for n in range(60)}
    files |= {f"copies/{n}.bmp": stored(picture(n), "BMP") for n in range(3)}
    members = [(f"{n}.{end}", data) for n in range(60, 90) for end, data in (("png", png(n)), ("cls", b"c"))]
    members += [(f"copy{n}.png", png(n)) for n in (3, 60, 61)] + [(f"copy{n}.cls", b"d") for n in (3, 60, 61)]
    members.sort()
    folder = tmp_path_factory.mktemp("images")
    return spread(folder, files | {"more.tar": tar_of(members), "a/broken.png": b"x", "notes.md": b"x"})


IMAGES = {"content": {"kind": "images", "shortest_edge": 24}, "max_error_rate": 0.05, "unit_mib": 0.08}


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "images"
    return folder, prepare(PipelineConfig.model_validate(values_of(corpus, folder, **IMAGES)))


def test_every_file_is_accounted_for_and_copies_are_dropped(prepared):
    folder, manifest = prepared
    assert len(manifest.ledgers) >= 4
    assert manifest.dropped == {"duplicate_other_label": 6}
    assert manifest.failed == {"not_an_image": 1}
    assert manifest.totals["read"] == 97
    assert manifest.labels == {"a": 30, "b": 30, "c": 30}
    assert manifest.notes == {"smaller": 90}
    assert [skip.files for skip in manifest.skipped.values()] == [1]
    assert not (folder / "tokenizer").exists()
    assert load_manifest(folder) == manifest
    assert check_shards(folder, full=True) == []
    ids = [
        row["id"]
        for split in ("train", "held-out")
        for row in ShardSet(folder, split)
        .take(np.arange(manifest.totals[f"kept_{split.replace('-', '_')}"]))
        .to_pylist()
    ]
    assert len(set(ids)) == 90
    assert 5 <= manifest.totals["kept_held_out"] <= 35


def test_the_command_plans_verifies_and_inspects(corpus, prepared, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"prepare": values_of(corpus, tmp_path / "out", **IMAGES)}))
    assert main([str(config), "--plan"]) == 0
    planned = capsys.readouterr().out
    assert re.search(r"images      9[67]\b.*, of which 96\b", planned)
    assert "pixels" in planned
    assert "tokens" not in planned
    assert main([str(config)]) == 0
    told = capsys.readouterr().out
    says(told, "97 images read", "90 kept")
    assert f"{90 * 32 * 24:,} pixels in" in told
    says(told, "3 labels", "90 smaller")
    assert main([str(config), "--verify-inputs"]) == 0
    assert checksums(tmp_path / "out").keys() == checksums(prepared[0]).keys()
    says("\n".join(describe(tmp_path / "out")), "images", "3 labels")


def test_lost_shards_are_made_again_to_the_byte(corpus, prepared, tmp_path):
    config = PipelineConfig.model_validate(values_of(corpus, tmp_path / "out", **IMAGES))
    prepare(config)
    whole = checksums(tmp_path / "out")
    assert whole == checksums(prepared[0])
    (tmp_path / "out" / "train-00001.arrow").unlink()
    path = tmp_path / "out" / "train-00002.arrow"
    path.write_bytes(path.read_bytes()[:100])
    prepare(config)
    assert checksums(tmp_path / "out") == whole


def io_read(data):
    """Samples as they are stored, and the rate."""
    return soundfile.read(io.BytesIO(data), dtype="int16")


def test_too_many_files_without_a_label_end_with_an_error(tmp_path, capsys):
    corpus = spread(tmp_path / "in", {f"{n}.png": png(n) for n in range(5)} | {"a/x.png": png(7)})
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"prepare": values_of(corpus, tmp_path / "out", **IMAGES)}))
    assert main([str(config)]) == 1
    told = capsys.readouterr().err
    says(told, "5 of 6 images failed", "5 no_label")
    says(told, "no folder")
    (corpus / "a" / "x.png").unlink()
    config.write_text(yaml.safe_dump({"prepare": values_of(corpus, tmp_path / "other", **IMAGES)}))
    assert main([str(config)]) == 1
    told = capsys.readouterr().err
    says(told, "none of 5 records", "images", "5 no_label", "content.label")


def test_a_text_objective_refuses_images(prepared):
    config = runs.train_config(prepared[0], "unused")
    (told,) = [problem for problem in problems(config) if "reads" in problem]
    says(told, "images", "the main task", "texts")


def test_a_tar_in_a_tar_in_a_tar_is_read_and_a_deeper_one_is_a_failure(tmp_path):
    data = tar_of([("k/x.png", png(1)), ("k/y.png", png(2))])
    for depth in range(5):
        (tmp_path / f"{depth}").mkdir()
        spread(tmp_path / f"{depth}", {"a.tar": data})
        data = tar_of([(f"{depth}.tar", data)])
    reasons = []
    for depth in range(5):
        config = PipelineConfig.model_validate(values_of(tmp_path / f"{depth}", tmp_path / "out", **IMAGES))
        (unit,), _ = plan_units(config.corpus, config.unit_mib, None, config.content)
        records = list(read_unit(unit, config.corpus, config.content))
        reasons.append([getattr(record, "reason", "row") for record in records])
    assert reasons == [["row", "row"]] * 4 + [["too_deep"]]
