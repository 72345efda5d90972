"""Documents, pairs and images prepared on Ray: accounted for, the same to the byte whatever happens, clear refusals."""

import gzip
import json
import os
import re
import shutil

import preparing
import pytest
import tinyruns as runs
from broken import truncate
from corpora import TEXT, tar
from mediafiles import picture, png, spread, stored
from messages import all_of, says
from preparing import checksums
from vocabularies import wordpiece
from volumes import small_volume

from declutr.cli.main import main as declutr
from declutr.common.errors import ConfigError, ShardError
from declutr.inspection.describe import describe
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.prepare import main, prepare
from declutr.pipeline.shards.ledger import ledger_entries
from declutr.pipeline.shards.shards import ShardSet, check_shards, load_manifest
from declutr.trainer.run import RunPlan, unknown

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("session")]
WORDS = TEXT.replace("nearby", "that lies nearby").split()  # or some of the texts pass for French


def text(number: int, count: int = 120) -> str:
    return " ".join(f"{WORDS[(number * 7 + i * i) % len(WORDS)]}{number * i % 89}" for i in range(count))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two files of 60 documents: a copy, a near copy, a German one, a planted question, a short one, a bad line."""
    folder = tmp_path_factory.mktemp("accounting") / "corpus"
    folder.mkdir()
    (folder.parent / "questions.txt").write_text(" ".join(f"planted{n} question{n}" for n in range(10)) + "\n")
    texts = [text(number) for number in range(60)]
    texts[21] = texts[3].replace(" ", "\n")
    texts[25] = " ".join("changed" if i % 40 == 7 else word for i, word in enumerate(texts[4].split()))
    texts[30] = "Dies ist ein langer deutscher Satz über den Hund, der nicht mehr nach Hause kommen wollte. " * 10
    texts[31] = text(31, 60) + " " + (folder.parent / "questions.txt").read_text() + " " + text(32, 60)
    texts[35] = "too short"
    rows = [b'{"text": "\xff"}' if number == 38 else {"text": words} for number, words in enumerate(texts)]
    preparing.write_jsonl(folder / "a.jsonl", *rows[:30])
    preparing.write_jsonl(folder / "b.jsonl", *rows[30:])
    return folder


def values_of(corpus, output, **changes):
    filters = {"language": {"keep": ["en"]}}
    if (questions := corpus.parent / "questions.txt").exists():
        filters["contamination"] = {"paths": [str(questions)]}
    own = {"duplicates": {"near": {}}, "write_rejected": True, "max_error_rate": 0.05, "unit_mib": 0.01}
    return preparing.values_of(corpus, output, **preparing.DOCUMENTS | own | {"filters": filters} | changes)


def config_of(*arguments, **changes):
    return PipelineConfig.model_validate(values_of(*arguments, **changes))


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    """The folder of a `prepare` that `--plan` preceded, and its manifest."""
    folder = tmp_path_factory.mktemp("prepared")
    config = str(runs.write_config(folder / "config.yaml", prepare=values_of(corpus, folder / "out")))
    assert main([config, "--plan"]) == 0
    assert not (folder / "out" / "manifest.json").exists()
    assert main([config]) == 0
    return folder / "out", load_manifest(folder / "out")


def rows_of(folder, split):
    shards = ShardSet(folder, split)
    return shards.take(range(shards.num_documents)).to_pylist()


def test_every_document_is_accounted_for(prepared):
    """Totals close, entries are in order, and a row of the ledger leads to the row of the shard."""
    folder, manifest = prepared
    totals = manifest.totals
    assert manifest.failed == {"invalid_utf8": 1}
    assert manifest.dropped == {"duplicate": 1, "language_other": 1, "near_duplicate": 1, "too_short": 1}
    assert (totals["read"], totals["kept"]) == (60, 55)
    assert check_shards(folder, full=True) == []
    assert len(manifest.ledgers) > 2
    entries = [entry for ledger in manifest.ledgers for entry in ledger_entries(folder / ledger.name)]
    assert [(entry.source, entry.offset) for entry in entries] == sorted((e.source, e.offset) for e in entries)
    for split, count in (("train", totals["kept_train"]), ("held-out", totals["kept_held_out"])):
        rows = [[row[key] for key in ("id", "num_tokens", "source", "offset")] for row in rows_of(folder, split)]
        assert rows == [[e.id, e.num_tokens, e.source, e.offset] for e in entries if e.status == split]
        assert len(rows) == count
    assert 0.1 < totals["kept_held_out"] / totals["kept"] < 0.3
    (question,) = [entry for entry in entries if entry.status in ("train", "held-out") and entry.detail]
    assert "questions.txt" in question.detail
    rejected = {}
    for path in (folder / "rejected").iterdir():
        rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        rejected |= {row["reason"]: row for row in rows}
    assert rejected.keys() == {"duplicate", "language_other", "near_duplicate", "too_short", "invalid_utf8"}
    short = {"id": "", "source": "b.jsonl", "offset": 0, "reason": "too_short", "detail": None, "text": "too short"}
    assert rejected["too_short"] | {"id": "", "offset": 0} == short
    assert rejected["duplicate"]["text"] == text(3)
    assert rejected["near_duplicate"]["text"].split().count("changed") == 3
    progress = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    assert progress[-1]["documents"] == 60
    assert progress[-1]["input_bytes"] == progress[-1]["total_input_bytes"]


def test_the_same_command_again_changes_nothing_and_other_settings_or_inputs_are_refused(
    corpus, prepared, tmp_path, capsys
):
    folder, manifest = prepared
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert main([str(folder.with_name("config.yaml"))]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    says(line, "60 documents read", f"{manifest.totals['kept_held_out']} held out")
    assert load_manifest(folder) == manifest
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times
    before = checksums(folder)
    with pytest.raises(ConfigError, match=all_of("geometry.max_tokens", "here 16", "there 32")):
        prepare(config_of(corpus, folder, geometry={"num_anchors": 1, "max_tokens": 16}))
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="other settings"):
        prepare(config_of(tmp_path, folder))
    extra = corpus / "c.jsonl"
    extra.write_text('{"text": "new"}')
    with pytest.raises(ConfigError, match=all_of("other inputs", "1 of")):
        prepare(config_of(corpus, folder))
    extra.unlink()
    shutil.rmtree(folder / "tokenizer")
    assert prepare(config_of(corpus, folder)) == manifest
    assert checksums(folder) == before, "the tokenizer is made again"
    # The state of the inputs goes with a unit from its candidates to what is kept of them.
    changed = corpus / "a.jsonl"
    content, times = changed.read_bytes(), changed.stat()
    changed.touch()
    assert prepare(config_of(corpus, folder), verify_inputs=True) == manifest
    changed.write_bytes(content.replace(b"the", b"teh"))
    with pytest.raises(ConfigError, match=all_of("units changed", "restore")):
        prepare(config_of(corpus, folder))
    changed.write_bytes(content)
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert checksums(folder) == before


def test_a_tokenizer_that_was_replaced_is_refused_and_words_it_does_not_know_are_counted(corpus, tmp_path):
    folder, words = tmp_path / "tokenizer", " ".join(text(number) for number in range(20)).lower().split()
    settings = {"tokenizer": {"kind": "pretrained", "name": str(folder)}, "filters": {}, "duplicates": {}}
    wordpiece(words, 300).save_pretrained(str(folder))
    manifest = prepare(config_of(corpus, tmp_path / "out", **settings))
    assert manifest.totals["unknown_tokens"] > 0.01 * manifest.totals["num_tokens"]
    prepare(config_of(corpus, tmp_path / "out", **settings))  # the same command
    wordpiece([*words, "other"] * 9, 200).save_pretrained(str(folder))
    with pytest.raises(ConfigError, match=all_of("tokenizer.name", "was changed", "output")):
        prepare(config_of(corpus, tmp_path / "out", **settings))


def test_a_disk_that_fills_up_ends_in_words_and_the_same_command_continues(corpus, tmp_path, prepared):
    with small_volume(tmp_path / "volume", 2) as volume:
        config = config_of(corpus, volume.path / "out")
        volume.fill(leave_bytes=100_000)
        with pytest.raises(ShardError, match=all_of("No space left on device", "same command")):
            prepare(config)
        assert not (volume.path / "out" / "manifest.json").exists()
        volume.drain()
        prepare(config)
        assert checksums(volume.path / "out") == checksums(prepared[0])


def test_inspect_says_where_a_document_is_and_why_it_was_dropped(prepared, capsys):
    folder, _ = prepared
    entries = {entry.status: entry for path in sorted((folder / "ledger").iterdir()) for entry in ledger_entries(path)}

    def inspect(document):
        assert declutr(["inspect", str(folder), "--document", document]) == 0
        return capsys.readouterr().out

    near, entry = entries["near_duplicate"], entries["train"]
    assert "dropped: near_duplicate" in inspect(near.id.hex())
    says(inspect(near.id.hex()), "copy", "kept")
    assert "failed: invalid_utf8" in inspect("{0.source}:{0.offset}".format(entries["invalid_utf8"]))
    assert f"row {entry.row} of train-" in inspect(entry.id.hex()[:12])
    assert f"{entry.num_tokens:,} tokens\n    " in inspect(entry.id.hex()[:12])
    for document, facts in (("nowhere", "'nowhere'"), ("my/nowhere.txt:0", ("nowhere.txt:0", "id"))):
        assert declutr(["inspect", str(folder), "--document", document]) == 1
        says(capsys.readouterr().err, facts)


def test_a_task_that_cannot_write_or_too_many_failures_end_with_words(corpus, prepared, tmp_path, capsys):
    config = str(runs.write_config(tmp_path / "config.yaml", prepare=values_of(corpus, tmp_path / "out")))
    candidates = tmp_path / "out" / "candidates"
    candidates.mkdir(parents=True)
    (candidates / "ledger").write_text("in the way")
    shutil.copy(prepared[0] / "plan.json", tmp_path / "out")
    assert main([config]) == 1
    errors = capsys.readouterr().err
    says(errors, "same command")
    assert "Traceback" not in errors
    (candidates / "ledger").unlink()
    assert main([config, "max_error_rate=0.01"]) == 1
    errors = capsys.readouterr().err
    says(errors, "1 of 60 documents", "1 invalid_utf8", "1.67%", "max_error_rate = 0.01")
    assert "b.jsonl" in errors
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert main([config, "max_error_rate=0.03"]) == 0
    assert not candidates.exists()


LABELS = ("entailment", "neutral", "contradiction")
REQUIRED = {"kind": "pairs", "required_labels": ["entailment", "contradiction"]}
SETTINGS = {
    "pairs": {"tokenizer": preparing.DOCUMENTS["tokenizer"], "content": REQUIRED, "unit_mib": 0.02},
    "images": {"content": {"kind": "images", "shortest_edge": 24}, "max_error_rate": 0.05, "unit_mib": 0.08},
}


def write_pairs(folder):
    """Three pairs a premise in four files; every tenth premise lacks a contradiction and has its entailment twice."""
    spread(folder, {"README.md": b"About these files."})
    for file in range(4):
        lines = []
        for number in range(100 * file, 100 * (file + 1)):
            for place, label in enumerate(LABELS):
                lacking = number % 10 == 9 and label == "contradiction"
                premise = f"The premise with the number {number} is {number * 31 % 97} words long."
                hypothesis = f"Its hypothesis {0 if lacking else place} is about number {number * 7 % 89}."
                lines.append((premise, hypothesis, "entailment" if lacking else label if number % 2 else place))
        lines += [("a", "b", "perhaps")] * (file == 2)
        preparing.write_jsonl(folder / f"{file}.jsonl", *(preparing.make_pair(*pair) for pair in lines))


def write_images(folder):
    """90 images in class folders and in an archive with labels; six copies with other names, formats and labels."""
    files = {f"{'ab'[n % 2]}/{n:03}.png": png(n) for n in range(60)}
    files |= {f"copies/{n}.bmp": stored(picture(n), "BMP") for n in range(3)}
    members = [(f"{n}.{end}", data) for n in range(60, 90) for end, data in (("png", png(n)), ("cls", b"c"))]
    members += [(f"copy{n}.png", png(n)) for n in (3, 60, 61)] + [(f"copy{n}.cls", b"d") for n in (3, 60, 61)]
    spread(folder, files | {"more.tar": tar(sorted(members)), "a/broken.png": b"x", "notes.md": b"x"})


@pytest.mark.parametrize(
    ("kind", "dropped", "failed", "kept", "labels"),
    [
        ("pairs", {"lacks_contradiction": 40, "repeated_pair": 40}, {"unknown_label": 1}, 360,
         dict.fromkeys(sorted(LABELS), 360)),
        ("images", {"duplicate_other_label": 6}, {"not_an_image": 1}, 90, {"a": 30, "b": 30, "c": 30}),
    ],
)  # fmt: skip
def test_every_row_is_accounted_for(tmp_path, capsys, kind, dropped, failed, kept, labels):
    (write_pairs if kind == "pairs" else write_images)(tmp_path / "in")
    values, outputs = preparing.values_of(tmp_path / "in", tmp_path / "out", **SETTINGS[kind]), []
    path = str(runs.write_config(tmp_path / "config.yaml", prepare=values))
    for options in (["--plan"], [], ["--verify-inputs"]):
        assert main([path, *options]) == 0
        outputs.append(capsys.readouterr().out)
    planned, report, _ = outputs
    config, folder = PipelineConfig.model_validate(values), tmp_path / "out"
    manifest, description = prepare(config), "\n".join(describe(folder))
    assert len(manifest.ledgers) >= 4
    assert (manifest.dropped, manifest.failed, manifest.labels) == (dropped, failed, labels)
    assert manifest.totals["read"] == kept + sum(dropped.values()) + 1
    assert sum(skip.files for skip in manifest.skipped.values()) == 1
    assert load_manifest(folder) == manifest
    assert check_shards(folder, full=True) == []
    assert not (folder / "rejected").exists()
    train, held_out = rows_of(folder, "train"), rows_of(folder, "held-out")
    assert len({row["id"] for row in train + held_out}) == manifest.totals["kept"] == kept
    assert 0.05 < len(held_out) / kept < 0.4
    if kind == "pairs":
        assert all(row["labels"] == [-1, 0, 1, 2] for row in train)
        assert "perhaps" in manifest.failures[0].message
        assert "360 kept" in planned
        says(report, "441 rows read", "360 kept")
        says(report, "360 contradiction", "360 entailment", "360 neutral")
        says(description, "rows of pairs", "360 contradiction")
        assert description.count("    premise ") == description.count("    neutral ") == 3
        assert "Spans" not in description
        entry = next(line for line in description.splitlines() if line.startswith("- row 0"))
        assert declutr(["inspect", config.output, "--document", entry.split("(")[1].partition(",")[0]]) == 0
        assert "    entailment " in capsys.readouterr().out
        values = runs.train_values(folder, "run")
        del values["spans"]
        before = runs.TrainConfig.model_validate(values)
        after = RunPlan.of(before).config
        assert (after.spans, unknown(after)) == (before.spans, []), "texts leave them at their defaults"
    else:
        assert manifest.notes == {"smaller": 90}
        assert not (folder / "tokenizer").exists()
        assert re.search(r"images      about 9[67], of which about 96 kept", planned)
        assert ["pixels" in planned, "tokens" in planned] == [True, False]
        says(report, "97 images read", "90 kept")
        assert f"{90 * 32 * 24:,} pixels in" in report
        says(report, "3 labels", "90 smaller")
        says(description, "images", "3 labels")
    before, (lost, cut_off) = checksums(folder), [folder / shard.name for shard in manifest.shards[:2]]
    lost.unlink()
    truncate(cut_off)
    lost.with_name(f".{lost.name}.1.tmp").write_text("left by a killed run")
    assert prepare(config) == manifest
    assert checksums(folder) == before, "both are made again to the byte"


def test_files_without_a_label_end_with_an_error(tmp_path):
    images = spread(tmp_path / "in", {f"{n}.png": png(n) for n in range(5)})
    with pytest.raises(ConfigError, match=all_of("none of 5 records", "images", "5 no_label", "content.label")):
        prepare(PipelineConfig.model_validate(preparing.values_of(images, tmp_path / "out", **SETTINGS["images"])))
