"""Sentences, pairs, triples, images and sounds prepared for real, on Ray: accounted for, shown, mended, refused."""

import gzip
import json
import re

import numpy as np
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
from declutr.pipeline.job.units import plan_units, read_unit
from declutr.pipeline.prepare import main, prepare
from declutr.pipeline.shards.shards import ShardSet, check_shards, load_manifest
from declutr.trainer.data.chunks import read_chunk
from declutr.trainer.run import RunPlan, unknown

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("session")]
LABELS = ("entailment", "neutral", "contradiction")
NEEDS = ["entailment", "contradiction"]
PAIRS = {
    "tokenizer": {"kind": "train", "vocab_size": 400, "sample_mib": 0.1},
    "content": {"kind": "pairs", "required_labels": NEEDS},
    "unit_mib": 0.02,
}


def pairs_of(first, last):
    """Three pairs a premise; every tenth premise lacks a contradiction, and its entailment is there twice."""
    for number in range(first, last):
        for place, label in enumerate(LABELS):
            lacking = number % 10 == 9 and label == "contradiction"
            yield {
                "premise": f"The premise with the number {number} is {number * 31 % 97} words long.",
                "hypothesis": f"Its hypothesis {0 if lacking else place} is about number {number * 7 % 89}.",
                "label": "entailment" if lacking else label if number % 2 else place,
            }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Four files of pairs, one compressed; a line with another label, one without a label, another kind of file."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(4):
        lines = [json.dumps(pair) for pair in pairs_of(100 * number, 100 * (number + 1))]
        if number == 2:
            lines.insert(7, json.dumps({"premise": "a", "hypothesis": "b", "label": "perhaps"}))
            lines.append(json.dumps({"premise": "a", "hypothesis": "b", "label": "-"}))
        raw = "\n".join(lines).encode()
        path = folder / (f"{number}.jsonl.gz" if number == 3 else f"{number}.jsonl")
        path.write_bytes(gzip.compress(raw) if number == 3 else raw)
    (folder / "README.md").write_text("About these files.")
    return folder


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "pairs"
    return folder, prepare(PipelineConfig.model_validate(values_of(corpus, folder, **PAIRS)))


def test_every_pair_is_accounted_for(prepared):
    folder, manifest = prepared
    totals = manifest.totals
    assert len(manifest.ledgers) == 4
    assert manifest.dropped == {"lacks_contradiction": 40, "no_gold_label": 1, "repeated_pair": 40}
    assert manifest.failed == {"unknown_label": 1}
    assert totals["kept"] == 360
    assert totals["read"] == 360 + 81 + 1
    assert manifest.labels == dict.fromkeys(sorted(LABELS), 360)
    assert "perhaps" in manifest.failures[0].message
    assert sum(skip.files for skip in manifest.skipped.values()) == 1  # README.md
    assert load_manifest(folder) == manifest
    assert check_shards(folder, full=True) == []
    rows = [*ShardSet(folder, "train").take(range(totals["kept_train"])).to_pylist()]
    assert all(row["labels"] == [-1, 0, 1, 2] for row in rows)
    assert 0.1 < totals["kept_held_out"] / totals["kept"] < 0.3


def commanded(folder, corpus, prepared, changes, capsys):
    """What the command says of its plan, of its work, and what `inspect` says of the shards, which are the prepared."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"prepare": values_of(corpus, folder / "out", **changes)}))
    said = []
    for options in (["--plan"], [], ["--verify-inputs"]):
        assert main([str(config), *options]) == 0
        said.append(capsys.readouterr().out)
    assert checksums(folder / "out") == checksums(prepared[0])
    return *said[:2], "\n".join(describe(folder / "out"))


def test_the_command_plans_reports_and_inspects(corpus, prepared, tmp_path, capsys):
    planned, done, shown = commanded(tmp_path, corpus, prepared, PAIRS, capsys)
    assert "360 kept" in planned
    says(done, "442 rows read", "360 kept")
    says(done, "360 contradiction", "360 entailment", "360 neutral")
    says(shown, "rows of pairs", "360 contradiction")
    assert shown.count("    premise ") == shown.count("    neutral ") == 3
    assert "Spans" not in shown
    entry = next(line for line in shown.splitlines() if line.startswith("- row 0"))
    assert declutr(["inspect", str(tmp_path / "out"), "--document", entry.split("(")[1].partition(",")[0]]) == 0
    assert "    entailment " in capsys.readouterr().out


def test_shards_of_texts_leave_spans_at_their_defaults(prepared, tmp_path):
    values = runs.train_values(prepared[0], tmp_path / "run")
    del values["spans"]
    before = runs.TrainConfig.model_validate(values)
    after = RunPlan.of(before).config
    assert after.spans == before.spans
    assert unknown(after) == []


def test_a_chunk_of_texts_has_their_columns(prepared):
    from declutr.trainer.data.chunks import rank_plan
    from declutr.trainer.data.plan import Plan

    shards = ShardSet(prepared[0], "train")
    plan = Plan(seed=0, num_documents=shards.num_documents, batch_documents=8)
    chunk = read_chunk({"id": np.zeros(1, np.int64)}, rank_plan(plan, shards, 0, 1, 0, 2), 0)
    assert chunk.schema.names == ["id", "tokens", "starts", "labels", "num_tokens", "epoch"]
    assert len(chunk) == 16


def test_documents_are_split_into_sentences(tmp_path):
    texts = [
        f"Document {n} has Dr. Smith in it. It costs $3.{n:02d} now.\n\nA heading\n\nThe end of {n}." for n in range(40)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    content = {"kind": "sentences", "split": True}
    manifest = prepare(
        PipelineConfig.model_validate(values_of(tmp_path / "a.jsonl", tmp_path / "out", **PAIRS | {"content": content}))
    )
    assert manifest.totals["read"] == 160
    assert manifest.dropped == {"duplicate": 39}  # "A heading" is everywhere the same
    assert manifest.totals["kept"] == 121
    shown = "\n".join(describe(tmp_path / "out"))
    assert "rows of sentences\n" in shown
    assert shown.count("    sentence ") == 3


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """90 images in class folders and in an archive with labels; six copies with other names, formats and labels."""
    files = {f"{'ab'[n % 2]}/{n:03}.png": png(n) for n in range(60)}
    files |= {f"copies/{n}.bmp": stored(picture(n), "BMP") for n in range(3)}
    members = [(f"{n}.{end}", data) for n in range(60, 90) for end, data in (("png", png(n)), ("cls", b"c"))]
    members += [(f"copy{n}.png", png(n)) for n in (3, 60, 61)] + [(f"copy{n}.cls", b"d") for n in (3, 60, 61)]
    members.sort()
    folder = tmp_path_factory.mktemp("images")
    return spread(folder, files | {"more.tar": tar(members), "a/broken.png": b"x", "notes.md": b"x"})


IMAGES = {"content": {"kind": "images", "shortest_edge": 24}, "max_error_rate": 0.05, "unit_mib": 0.08}


@pytest.fixture(scope="module")
def prepared_images(images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared_images") / "images"
    return folder, prepare(PipelineConfig.model_validate(values_of(images, folder, **IMAGES)))


def test_every_file_is_accounted_for_and_copies_are_dropped(prepared_images):
    folder, manifest = prepared_images
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


def test_the_command_plans_verifies_and_inspects_images(images, prepared_images, tmp_path, capsys):
    planned, done, shown = commanded(tmp_path, images, prepared_images, IMAGES, capsys)
    assert re.search(r"images      9[67]\b.*, of which 96\b", planned)
    assert "pixels" in planned
    assert "tokens" not in planned
    says(done, "97 images read", "90 kept")
    assert f"{90 * 32 * 24:,} pixels in" in done
    says(done, "3 labels", "90 smaller")
    says(shown, "images", "3 labels")


def test_files_without_a_label_end_with_an_error(tmp_path):
    images = spread(tmp_path / "in", {f"{n}.png": png(n) for n in range(5)})
    with pytest.raises(ConfigError, match=all_of("none of 5 records", "images", "5 no_label", "content.label")):
        prepare(PipelineConfig.model_validate(values_of(images, tmp_path / "out", **IMAGES)))


def test_a_tar_in_a_tar_in_a_tar_is_read_and_a_deeper_one_is_a_failure(tmp_path):
    data = tar([("k/x.png", png(1)), ("k/y.png", png(2))])
    for depth in range(5):
        (tmp_path / f"{depth}").mkdir()
        spread(tmp_path / f"{depth}", {"a.tar": data})
        data = tar([(f"{depth}.tar", data)])
    reasons = []
    for depth in range(5):
        config = PipelineConfig.model_validate(values_of(tmp_path / f"{depth}", tmp_path / "out", **IMAGES))
        (unit,), _ = plan_units(config.corpus, config.unit_mib, None, config.content)
        records = list(read_unit(unit, config.corpus, config.content))
        reasons.append([getattr(record, "reason", "row") for record in records])
    assert reasons == [["row", "row"]] * 4 + [["too_deep"]]
