"""Preparation for real, on Ray: accounted for, the same to the byte whatever happens, clear when it cannot be."""

import gzip
import json
import shutil

import preparing
import pytest
import yaml
from corpora import TEXT
from messages import all_of, says
from preparing import checksums
from vocabularies import wordpiece
from volumes import small_volume

from declutr.cli.main import main as declutr
from declutr.common.errors import ConfigError, ShardError
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.prepare import main, prepare
from declutr.pipeline.shards.ledger import ledger_entries
from declutr.pipeline.shards.shards import ShardSet, check_shards, load_manifest

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
    lines = [json.dumps({"text": t}).encode() for t in texts]
    lines[38] = b'{"text": "\xff"}'
    (folder / "a.jsonl").write_bytes(b"\n".join(lines[:30]))
    (folder / "b.jsonl").write_bytes(b"\n".join(lines[30:]))
    return folder


def values_of(corpus, output, **changes):
    filters = {"language": {"keep": ["en"]}}
    if (questions := corpus.parent / "questions.txt").exists():
        filters["contamination"] = {"paths": [str(questions)]}
    own = {"filters": filters, "duplicates": {"near": {}}, "write_rejected": True}
    own |= {"max_error_rate": 0.05, "unit_mib": 0.01}
    return preparing.values_of(corpus, output, **preparing.DOCUMENTS | own | changes)


def config_of(*arguments, **changes):
    return PipelineConfig.model_validate(values_of(*arguments, **changes))


@pytest.fixture
def typed(corpus, tmp_path):
    """A file of the settings for the command, whose output is `out` beside it."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"prepare": values_of(corpus, tmp_path / "out")}))
    return str(tmp_path / "config.yaml")


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    """The folder of a `prepare` that `--plan` preceded, and its manifest."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "config.yaml").write_text(yaml.safe_dump({"prepare": values_of(corpus, folder / "out")}))
    assert main([str(folder / "config.yaml"), "--plan"]) == 0
    assert not (folder / "out" / "manifest.json").exists()
    assert main([str(folder / "config.yaml")]) == 0
    return folder / "out", load_manifest(folder / "out")


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
        shards = ShardSet(folder, split)
        rows = shards.take(range(shards.num_documents)).select(["id", "num_tokens", "source", "offset"]).to_pylist()
        kept = [(e.id, e.num_tokens, e.source, e.offset) for e in entries if e.status == split]
        assert [tuple(row.values()) for row in rows] == kept
        assert len(rows) == count
    assert 0.1 < totals["kept_held_out"] / totals["kept"] < 0.3
    (question,) = [entry for entry in entries if entry.status in ("train", "held-out") and entry.detail]
    assert "questions.txt" in question.detail
    progress = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    assert progress[-1]["documents"] == 60
    assert progress[-1]["input_bytes"] == progress[-1]["total_input_bytes"]


def test_the_same_command_again_prints_one_line_and_changes_nothing(prepared, capsys):
    folder, manifest = prepared
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert main([str(folder.with_name("config.yaml"))]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    says(line, "60 documents read", f"{manifest.totals['kept_held_out']} held out")
    assert load_manifest(folder) == manifest
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_lost_and_truncated_shards_are_made_again_to_the_byte(corpus, tmp_path, prepared):
    folder = shutil.copytree(prepared[0], tmp_path / "out")
    names = [shard.name for shard in load_manifest(folder).shards]
    (folder / names[0]).unlink()
    (folder / names[1]).write_bytes((folder / names[1]).read_bytes()[:-1])
    (folder / ".train-00000.arrow.1.tmp").write_text("left by a killed run")
    prepare(config_of(corpus, folder))
    assert checksums(folder) == checksums(prepared[0])


def test_other_settings_or_inputs_in_the_same_folder_are_refused(corpus, prepared, tmp_path):
    folder, _ = prepared
    before = checksums(folder)
    with pytest.raises(ConfigError, match=all_of("geometry.max_tokens", "here 16", "there 32")):
        prepare(config_of(corpus, folder, geometry={"num_anchors": 1, "max_tokens": 16}))
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="other settings"):
        prepare(config_of(tmp_path, folder))
    extra = corpus / "c.jsonl"
    extra.write_text('{"text": "new"}')
    try:
        with pytest.raises(ConfigError, match=all_of("other inputs", "1 of")):
            prepare(config_of(corpus, folder))
    finally:
        extra.unlink()
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


def test_a_corpus_of_which_nothing_is_kept_says_why_and_leaves_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "too short"}\n{"text": ""}\n')
    with pytest.raises(ConfigError, match=all_of("none of 2 documents", "the longest", "64")):
        prepare(config_of(tmp_path / "a.jsonl", tmp_path / "out", filters={}))
    assert not (tmp_path / "out").exists()


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


def test_a_replaced_file_is_found_after_copies_were_removed(corpus, tmp_path):
    """The state of the inputs goes with a unit from its candidates to what is kept of them."""
    shutil.copytree(corpus, tmp_path / "in")
    config = config_of(tmp_path / "in", tmp_path / "out")
    manifest = prepare(config)
    changed = tmp_path / "in" / "a.jsonl"
    changed.touch()
    assert prepare(config, verify_inputs=True) == manifest
    changed.write_bytes(changed.read_bytes().replace(b"the", b"teh"))
    with pytest.raises(ConfigError, match=all_of("units changed", "restore")):
        prepare(config)


def test_inspect_says_where_a_document_is_and_why_it_was_dropped(prepared, capsys):
    folder, _ = prepared
    entries = {entry.status: entry for path in sorted((folder / "ledger").iterdir()) for entry in ledger_entries(path)}

    def inspect(document):
        assert declutr(["inspect", str(folder), "--document", document]) == 0
        return capsys.readouterr().out

    shown = inspect(entries["near_duplicate"].id.hex())
    assert "dropped: near_duplicate" in shown
    says(shown, "copy", "kept")
    assert "failed: invalid_utf8" in inspect("{0.source}:{0.offset}".format(entries["invalid_utf8"]))
    entry = entries["train"]
    shown = inspect(entry.id.hex()[:12])
    assert f"row {entry.row} of train-" in shown
    assert f"{entry.num_tokens:,} tokens\n    " in shown
    for document, facts in (("nowhere", ("'nowhere'",)), ("my/nowhere.txt:0", ("nowhere.txt:0", "id"))):
        assert declutr(["inspect", str(folder), "--document", document]) == 1
        says(capsys.readouterr().err, *facts)


def test_rejected_documents_are_there_with_text_and_reason(prepared):
    rejected = {}
    for path in (prepared[0] / "rejected").iterdir():
        for line in gzip.decompress(path.read_bytes()).splitlines():
            row = json.loads(line)
            rejected[row["reason"]] = row
    assert rejected.keys() == {"duplicate", "language_other", "near_duplicate", "too_short", "invalid_utf8"}
    assert rejected["too_short"] | {"id": "", "offset": 0} == {
        "id": "", "source": "b.jsonl", "offset": 0, "reason": "too_short", "detail": None, "text": "too short",
    }  # fmt: skip
    assert rejected["duplicate"]["text"] == text(3)
    assert rejected["near_duplicate"]["text"].split().count("changed") == 3


def test_too_many_failures_are_an_error_until_they_are_allowed(typed, tmp_path, capsys):
    assert main([typed, "max_error_rate=0.01"]) == 1
    error = capsys.readouterr().err
    says(error, "1 of 60 documents", "1 invalid_utf8", "1.67%", "max_error_rate = 0.01")
    assert "b.jsonl" in error
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert main([typed, "max_error_rate=0.03"]) == 0
    assert not (tmp_path / "out" / "candidates").exists()


def test_a_task_that_cannot_write_ends_with_words(typed, prepared, tmp_path, capsys):
    (tmp_path / "out" / "candidates").mkdir(parents=True)
    (tmp_path / "out" / "candidates" / "ledger").write_text("in the way")
    (tmp_path / "out" / "plan.json").write_bytes((prepared[0] / "plan.json").read_bytes())
    assert main([typed]) == 1
    error = capsys.readouterr().err
    says(error, "same command")
    assert "Traceback" not in error
    (tmp_path / "out" / "candidates" / "ledger").unlink()
    assert main([typed]) == 0
