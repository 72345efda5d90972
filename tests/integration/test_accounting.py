"""Every document is accounted for: where it is, why it was dropped, what failed."""

import gzip
import json

import pytest
import yaml
from messages import says

from declutr.cli.main import main as declutr
from declutr.pipeline.prepare import main
from declutr.pipeline.shards.ledger import ledger_entries
from declutr.pipeline.shards.shards import ShardSet, load_manifest

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("session")]
WORDS = (
    *("the", "span", "of", "a", "document", "is", "encoded", "and", "the", "mean", "of", "its", "tokens", "is"),
    *("pulled", "to", "an", "anchor", "that", "lies", "nearby"),
)


def text(number: int, count: int = 120) -> str:
    return " ".join(f"{WORDS[(number * 7 + i * i) % len(WORDS)]}{number * i % 89}" for i in range(count))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
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
def finished(prepared):
    """The output folder of a finished `prepare` that `--plan` preceded."""
    config = str(prepared / "config.yaml")
    assert main([config, "--plan"]) == 0
    assert not (prepared / "out" / "manifest.json").exists()
    assert main([config]) == 0
    return prepared / "out"


def test_totals_close_and_every_reason_is_counted(finished):
    manifest = load_manifest(finished)
    assert manifest.failed == {"invalid_utf8": 1}
    assert manifest.dropped == {"duplicate": 1, "language_other": 1, "near_duplicate": 1, "too_short": 1}
    assert manifest.totals["read"] == 40
    assert manifest.totals["kept"] == 35
    entries = [entry for ledger in manifest.ledgers for entry in ledger_entries(finished / ledger.name)]
    assert len(manifest.ledgers) > 2
    assert [(entry.source, entry.offset) for entry in entries] == sorted((e.source, e.offset) for e in entries)
    rows = {split: ShardSet(finished, split) for split in ("train", "held-out")}
    assert sum(shards.num_documents for shards in rows.values()) == 35


def test_a_row_of_the_ledger_leads_to_the_row_of_the_shard(finished):
    manifest = load_manifest(finished)
    for split in ("train", "held-out"):
        shards, number = ShardSet(finished, split), 0
        for ledger in manifest.ledgers:
            for entry in ledger_entries(finished / ledger.name):
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


def test_inspect_says_where_a_document_is_and_why_it_was_dropped(finished, capsys):
    entries = {
        entry.status: entry for path in sorted((finished / "ledger").iterdir()) for entry in ledger_entries(path)
    }
    entry = entries["near_duplicate"]
    lines = "\n".join(command(capsys, "inspect", finished, "--document", entry.id.hex()))
    assert "dropped: near_duplicate" in lines
    says(lines, "copy", "kept")
    entry = entries["invalid_utf8"]
    lines = "\n".join(command(capsys, "inspect", finished, "--document", f"{entry.source}:{entry.offset}"))
    assert "failed: invalid_utf8" in lines
    entry = entries["train"]
    shown = "\n".join(command(capsys, "inspect", finished, "--document", entry.id.hex()[:12]))
    assert f"row {entry.row} of train-" in shown
    assert f"{entry.num_tokens:,} tokens\n    " in shown
    assert declutr(["inspect", str(finished), "--document", "nowhere"]) == 1
    says(capsys.readouterr().err, "'nowhere'")
    assert declutr(["inspect", str(finished), "--document", "my/nowhere.txt:0"]) == 1
    says(capsys.readouterr().err, "nowhere.txt:0", "id")


def test_a_planted_question_is_noted(finished):
    noted = [e for path in sorted((finished / "ledger").iterdir()) for e in ledger_entries(path) if e.status == "train"]
    noted = [entry for entry in noted if entry.detail]
    assert len(noted) == 1
    assert "questions.txt" in noted[0].detail


def test_rejected_documents_are_there_with_text_and_reason(finished):
    found = {}
    for path in (finished / "rejected").iterdir():
        for line in gzip.decompress(path.read_bytes()).splitlines():
            rejected = json.loads(line)
            found[rejected["reason"]] = rejected["text"]
    assert found.keys() == {"duplicate", "language_other", "near_duplicate", "too_short", "invalid_utf8"}
    assert found["too_short"] == "too short"
    assert found["duplicate"] == text(3)
    assert found["near_duplicate"].split().count("changed") == 3


def test_too_many_failures_are_an_error_until_they_are_allowed(prepared, tmp_path, capsys):
    config = [str(prepared / "config.yaml"), f"output={tmp_path / 'out'}"]
    assert main([*config, "max_error_rate=0.01"]) == 1
    error = capsys.readouterr().err
    says(error, "1 of 40 documents", "1 invalid_utf8", "2.50%", "max_error_rate = 0.01")
    assert "b.jsonl" in error
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert main([*config, "max_error_rate=0.03"]) == 0
    assert not (tmp_path / "out" / "candidates").exists()


def test_a_task_that_cannot_write_ends_with_words(prepared, tmp_path, capsys):
    (tmp_path / "out" / "candidates").mkdir(parents=True)
    (tmp_path / "out" / "candidates" / "ledger").write_text("in the way")
    config = [str(prepared / "config.yaml"), f"output={tmp_path / 'out'}"]
    assert main(config) == 1
    says(capsys.readouterr().err, "`prepare`", "files")
    (tmp_path / "out" / "plan.json").write_bytes((prepared / "out" / "plan.json").read_bytes())
    assert main(config) == 1
    error = capsys.readouterr().err
    says(error, "same command")
    assert "Traceback" not in error
    (tmp_path / "out" / "candidates" / "ledger").unlink()
    assert main(config) == 0
