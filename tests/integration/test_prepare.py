"""Preparation for real, on Ray: accounted for, the same to the byte whatever happens, clear when it cannot be."""

import gzip
import json

import pytest
import yaml
from messages import all_of, says
from preparing import checksums, config_of
from volumes import small_volume

from declutr.cli.main import main as declutr
from declutr.common.errors import ConfigError, ShardError
from declutr.pipeline.prepare import main, prepare
from declutr.pipeline.shards.ledger import ledger_entries
from declutr.pipeline.shards.shards import ShardSet, check_shards, load_manifest

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("session")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """About 1.5 MB in a folder of two files, with one bad line."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": f"document {n}: " + f"{n * 31 % 97} words of it " * (n % 60)}) for n in range(1500)]
    (folder / "a.jsonl").write_bytes("\n".join(lines[:1000]).encode() + b"\n\xff\n")
    (folder / "b.jsonl").write_text("\n".join(lines[1000:]))
    return folder


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "out"
    return folder, prepare(config_of(corpus, folder))


def test_every_document_is_accounted_for(prepared):
    folder, manifest = prepared
    totals = manifest.totals
    assert totals["read"] == 1501
    assert manifest.failed == {"invalid_utf8": 1}
    assert totals["kept"] + manifest.dropped["too_short"] + 1 == 1501
    assert load_manifest(folder) == manifest
    assert check_shards(folder, full=True) == []
    train, held_out = ShardSet(folder, "train"), ShardSet(folder, "held-out")
    assert (train.num_documents, held_out.num_documents) == (totals["kept_train"], totals["kept_held_out"])
    assert 0.1 < held_out.num_documents / totals["kept"] < 0.3
    progress = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    assert progress[-1]["documents"] == 1501
    assert progress[-1]["input_bytes"] == progress[-1]["total_input_bytes"]


def test_the_same_command_again_prints_one_line_and_changes_nothing(corpus, prepared, tmp_path, capsys):
    folder, manifest = prepared
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    values = config_of(corpus, folder).model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"prepare": values}))
    assert main([str(tmp_path / "config.yaml")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    says(line, "1,501 documents read", f"{manifest.totals['kept_held_out']} held out")
    assert load_manifest(folder) == manifest
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_lost_and_truncated_shards_are_made_again_to_the_byte(corpus, tmp_path, prepared):
    folder = tmp_path / "out"
    prepare(config_of(corpus, folder))
    assert checksums(folder) == checksums(prepared[0])
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ("empty", "no documents")),
        ("not json\n", ("no document", "all 1 failed", "1 invalid_json")),
        ('{"text": "too short"}\n{"text": ""}\n', ("none of 2 documents", "the longest", "64")),
    ],
)
def test_a_corpus_of_which_nothing_is_kept_says_why_and_leaves_nothing(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=all_of(message)):
        prepare(config_of(tmp_path / "a.jsonl", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_ends_in_words_and_the_same_command_continues(corpus, tmp_path, prepared):
    with small_volume(tmp_path / "volume", 2) as volume:
        config = config_of(corpus, volume.path / "out")
        volume.fill(leave_bytes=400_000)
        with pytest.raises(ShardError, match=all_of("No space left on device", "same command")):
            prepare(config)
        assert not (volume.path / "out" / "manifest.json").exists()
        volume.drain()
        prepare(config)
        assert checksums(volume.path / "out") == checksums(prepared[0])


def test_a_replaced_file_is_found_after_copies_were_removed(corpus, tmp_path):
    """The state of the inputs goes with a unit from its candidates to what is kept of them."""
    (tmp_path / "in").mkdir()
    for path in corpus.glob("[ab].jsonl"):
        (tmp_path / "in" / path.name).write_bytes(path.read_bytes())
    config = config_of(tmp_path / "in", tmp_path / "out")
    manifest = prepare(config)
    before = checksums(tmp_path / "out")
    changed = tmp_path / "in" / "a.jsonl"
    changed.touch()
    assert prepare(config, verify_inputs=True) == manifest
    raw = bytearray(changed.read_bytes())
    raw[200_000] ^= 1
    changed.write_bytes(raw)
    with pytest.raises(ConfigError, match="units changed"):
        prepare(config)
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="restore"):
        prepare(config)
    assert checksums(tmp_path / "out").items() <= before.items()


WORDS = (
    *("the", "span", "of", "a", "document", "is", "encoded", "and", "the", "mean", "of", "its", "tokens", "is"),
    *("pulled", "to", "an", "anchor", "that", "lies", "nearby"),
)


def text(number: int, count: int = 120) -> str:
    return " ".join(f"{WORDS[(number * 7 + i * i) % len(WORDS)]}{number * i % 89}" for i in range(count))


@pytest.fixture(scope="module")
def accounted(tmp_path_factory):
    """Two files of 40 documents: a copy, a near copy, a German one, a planted question, short ones, a bad line."""
    folder = tmp_path_factory.mktemp("accounting")
    corpus = folder / "corpus"
    corpus.mkdir()
    (folder / "questions.txt").write_text(" ".join(f"planted{n} question{n}" for n in range(10)) + "\n")
    texts = [text(number) for number in range(40)]
    texts[21] = texts[3].replace(" ", "\n")
    texts[25] = " ".join("changed" if i % 40 == 7 else word for i, word in enumerate(texts[4].split()))
    texts[30] = "Dies ist ein langer deutscher Satz über den Hund, der nicht mehr nach Hause kommen wollte. " * 10
    texts[31] = text(31, 60) + " " + (folder / "questions.txt").read_text() + " " + text(32, 60)
    texts[35] = "too short"
    lines = [json.dumps({"text": t}).encode() for t in texts]
    lines[38] = b'{"text": "\xff"}'
    (corpus / "a.jsonl").write_bytes(b"\n".join(lines[:20]))
    (corpus / "b.jsonl").write_bytes(b"\n".join(lines[20:]))
    config = {
        "output": str(folder / "out"),
        "corpus": {"kind": "files", "paths": [str(corpus)]},
        "tokenizer": {"kind": "train", "vocab_size": 400, "sample_mib": 0.1},
        "geometry": {"num_anchors": 1, "max_tokens": 32},
        "filters": {"language": {"keep": ["en"]}, "contamination": {"paths": [str(folder / "questions.txt")]}},
        "duplicates": {"near": {}},
        "write_rejected": True,
        "max_error_rate": 0.05,
        "unit_mib": 0.01,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump({"prepare": config}))
    return folder


def command(capsys, *arguments: object) -> list[str]:
    """Lines that a command prints."""
    assert declutr([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.fixture(scope="module")
def accounts(accounted):
    """The output folder of a accounts `prepare` that `--plan` preceded."""
    config = str(accounted / "config.yaml")
    assert main([config, "--plan"]) == 0
    assert not (accounted / "out" / "manifest.json").exists()
    assert main([config]) == 0
    return accounted / "out"


def test_totals_close_and_every_reason_is_counted(accounts):
    manifest = load_manifest(accounts)
    assert manifest.failed == {"invalid_utf8": 1}
    assert manifest.dropped == {"duplicate": 1, "language_other": 1, "near_duplicate": 1, "too_short": 1}
    assert manifest.totals["read"] == 40
    assert manifest.totals["kept"] == 35
    entries = [entry for ledger in manifest.ledgers for entry in ledger_entries(accounts / ledger.name)]
    assert len(manifest.ledgers) > 2
    assert [(entry.source, entry.offset) for entry in entries] == sorted((e.source, e.offset) for e in entries)
    assert sum(ShardSet(accounts, split).num_documents for split in ("train", "held-out")) == 35
    (noted,) = [entry for entry in entries if entry.status == "train" and entry.detail]
    assert "questions.txt" in noted.detail, "it holds a question"


def test_a_row_of_the_ledger_leads_to_the_row_of_the_shard(accounts):
    manifest = load_manifest(accounts)
    for split in ("train", "held-out"):
        shards, number = ShardSet(accounts, split), 0
        for ledger in manifest.ledgers:
            for entry in ledger_entries(accounts / ledger.name):
                if entry.status == split:
                    row = shards.take([number])
                    assert row.column("id")[0].as_py() == entry.id
                    assert row.column("num_tokens")[0].as_py() == entry.num_tokens
                    assert (row.column("source")[0].as_py(), row.column("offset")[0].as_py()) == (
                        entry.source,
                        entry.offset,
                    )
                    number += 1
        assert number == shards.num_documents


def test_inspect_says_where_a_document_is_and_why_it_was_dropped(accounts, capsys):
    entries = {
        entry.status: entry for path in sorted((accounts / "ledger").iterdir()) for entry in ledger_entries(path)
    }
    entry = entries["near_duplicate"]
    lines = "\n".join(command(capsys, "inspect", accounts, "--document", entry.id.hex()))
    assert "dropped: near_duplicate" in lines
    says(lines, "copy", "kept")
    entry = entries["invalid_utf8"]
    lines = "\n".join(command(capsys, "inspect", accounts, "--document", f"{entry.source}:{entry.offset}"))
    assert "failed: invalid_utf8" in lines
    entry = entries["train"]
    shown = "\n".join(command(capsys, "inspect", accounts, "--document", entry.id.hex()[:12]))
    assert f"row {entry.row} of train-" in shown
    assert f"{entry.num_tokens:,} tokens\n    " in shown
    assert declutr(["inspect", str(accounts), "--document", "nowhere"]) == 1
    says(capsys.readouterr().err, "'nowhere'")
    assert declutr(["inspect", str(accounts), "--document", "my/nowhere.txt:0"]) == 1
    says(capsys.readouterr().err, "nowhere.txt:0", "id")


def test_rejected_documents_are_there_with_text_and_reason(accounts):
    found = {}
    for path in (accounts / "rejected").iterdir():
        for line in gzip.decompress(path.read_bytes()).splitlines():
            rejected = json.loads(line)
            found[rejected["reason"]] = rejected["text"]
    assert found.keys() == {"duplicate", "language_other", "near_duplicate", "too_short", "invalid_utf8"}
    assert found["too_short"] == "too short"
    assert found["duplicate"] == text(3)
    assert found["near_duplicate"].split().count("changed") == 3


def test_too_many_failures_are_an_error_until_they_are_allowed(accounted, tmp_path, capsys):
    config = [str(accounted / "config.yaml"), f"output={tmp_path / 'out'}"]
    assert main([*config, "max_error_rate=0.01"]) == 1
    error = capsys.readouterr().err
    says(error, "1 of 40 documents", "1 invalid_utf8", "2.50%", "max_error_rate = 0.01")
    assert "b.jsonl" in error
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert main([*config, "max_error_rate=0.03"]) == 0
    assert not (tmp_path / "out" / "candidates").exists()


def test_a_task_that_cannot_write_ends_with_words(accounted, tmp_path, capsys):
    (tmp_path / "out" / "candidates").mkdir(parents=True)
    (tmp_path / "out" / "candidates" / "ledger").write_text("in the way")
    config = [str(accounted / "config.yaml"), f"output={tmp_path / 'out'}"]
    assert main(config) == 1
    says(capsys.readouterr().err, "`prepare`", "files")
    (tmp_path / "out" / "plan.json").write_bytes((accounted / "out" / "plan.json").read_bytes())
    assert main(config) == 1
    error = capsys.readouterr().err
    says(error, "same command")
    assert "Traceback" not in error
    (tmp_path / "out" / "candidates" / "ledger").unlink()
    assert main(config) == 0
