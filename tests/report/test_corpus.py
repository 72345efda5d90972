"""What the page of a corpus counts and shows, against the folder it was made from."""

import base64
import gzip
import io
import json
import re
import shutil
import unicodedata
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from mediafiles import animated, png, sound, tone
from messages import says
from pages import checked
from PIL import Image
from prepared import Row, write_prepared
from preparing import make_pair, prepare_media, prepare_rows

from declutr.cli.main import main
from declutr.pipeline.shards.content import LABELS
from declutr.pipeline.shards.ledger import ledger_entries
from declutr.pipeline.shards.manifest import MANIFEST
from declutr.pipeline.shards.shards import ShardSet
from declutr.pipeline.shards.windows import shortest_document
from declutr.report import survey
from declutr.report.charts import COLOURS, draw_histogram
from declutr.report.corpus import gather, glance, readiness, thumbnail, write_corpus_page
from declutr.report.survey import Tallies, Tally

HOSTILE = '"><script>alert(1)<'


@pytest.fixture(scope="module")
def content(prepared):
    return gather(prepared[0])


def entries(folder):
    return [entry for path in sorted((folder / "ledger").glob("*.arrow")) for entry in ledger_entries(path)]


def test_fates_sources_matches_and_lengths_are_those_of_the_ledgers(prepared, content):
    rows, totals = entries(prepared[0]), prepared[1].totals
    for status, tally in content.statuses.items():
        matching = [row for row in rows if row.status == status]
        assert (tally.read, tally.text_bytes) == (len(matching), sum(row.text_bytes for row in matching))
    assert sum(tally.read for tally in content.statuses.values()) == totals["read"] == len(rows)
    assert (content.kept_tally.kept, content.kept_tally.kept_tokens) == (totals["kept"], totals["num_tokens"])
    reasons = [(reason, role) for reason, role, _ in content.reasons()]
    assert reasons[:2] == [("too_short", "short"), ("duplicate", "dropped")]
    assert ("invalid_json", "failed") in reasons
    sources = dict(content.sources())
    assert set(sources) == {"web.tar", "a.jsonl", "b.jsonl", "<script>alert(1)</script>\u202e.jsonl"}
    matching = [row for row in rows if row.source == "b.jsonl"]
    expected = [row for row in matching if row.row is not None]
    assert (sources["b.jsonl"].read, sources["b.jsonl"].kept) == (len(matching), len(expected))
    assert sources["b.jsonl"].kept_tokens == sum(row.num_tokens for row in expected)
    languages = {name: tally.read for name, tally in content.languages()}
    assert languages == {"en": 63, "de": 5, "xx": 1, "not determined": 2}
    kept, short, dropped = content.lengths().values()
    assert kept.total() + short.total() + dropped.total() == sum(row.num_tokens is not None for row in rows)
    assert max(short) < shortest_document(prepared[1].geometry) <= min(kept)
    (match,) = content.survey.matches.values()
    assert (match.name, match.kept, match.dropped, match.max_ngrams) == ("sts12", 1, 1, 3)


@pytest.mark.parametrize("limit", [32, 2048, 1000, 7])
def test_a_length_next_to_the_limit_is_in_the_bar_next_to_it(limit):
    counts = {"kept": Counter({limit - 1: 1, limit: 10, limit + 1: 10})}
    svg = draw_histogram("h", "title", "tokens", limit, counts, {}).svg
    paths = re.findall(rf'd="([^"]+)"[^>]*{COLOURS["kept"]}', svg)
    heights = [np.ptp(np.array(re.findall(r"[\d.]+ ([\d.]+)", path), float)) for path in paths]
    assert heights == pytest.approx([heights[1] / 20, heights[1]], rel=0.01)


def test_examples_are_of_their_reason_and_carry_their_text(prepared, content):
    files = sorted((prepared[0] / "rejected").iterdir())
    written = [json.loads(line) for path in files for line in gzip.decompress(path.read_bytes()).splitlines()]
    texts = {(text["source"], text["offset"]): (text["reason"], text["text"][:600]) for text in written}
    assert len(texts) == len(written)
    for reason, examples in content.rejected.items():
        assert 1 <= len(examples) <= 3
        for example in examples:
            assert texts[example.source, example.offset] == (reason, example.text)
    assert len(content.kept) == len({example.offset for example in content.kept})
    places = {(row.source, row.offset) for row in entries(prepared[0]) if row.status == "train"}
    assert {(example.source, example.offset) for example in content.kept} <= places


def test_the_page_has_the_totals_of_the_manifest_and_its_settings(prepared, content, tmp_path):
    before = (prepared[0] / "manifest.json").stat().st_mtime
    source = write_corpus_page(prepared[0], tmp_path).read_text()
    assert (prepared[0] / "manifest.json").stat().st_mtime == before
    numbers = {name: int(n.replace(",", "")) for name, n in re.findall(r'id="total-(\w+)">([\d,]+)<', source)}
    assert numbers == {name: prepared[1].totals[name] for name in ("read", "kept", "dropped", "failed", "num_tokens")}
    page = checked(source)
    for line in (*(" ".join(line.split()) for line in glance(content)), "max_tokens: 16", "a.jsonl:59 invalid_json:"):
        assert line in page.text
    assert "<script>document.title='run'</script>" in page.text
    lengths = [float(attrs["value"]) for name, attrs in page.elements if name == "meter"]
    reasons = [tally.read for _, _, tally in content.reasons()]
    assert lengths[: len(reasons)] == pytest.approx([number / reasons[0] for number in reasons], abs=1e-4)
    assert source == write_corpus_page(prepared[0], tmp_path / "again").read_text()


def test_ledgers_that_contradict_the_manifest_are_an_error(tmp_path, capsys):
    """Before that, a page without rejected texts, which names their places."""
    folder = tmp_path / "out"
    manifest = write_prepared(folder, [[Row("word " * 60), Row("few", "too_short")]], write_rejected=False)
    assert write_corpus_page(folder) == folder / "report" / "report.html"
    page = checked((folder / "report" / "report.html").read_text())
    assert "a.jsonl:1" in page.text
    assert "write_rejected: true" in page.text
    assert "few" not in page.text
    wrong = manifest.model_copy(update={"dropped": {"empty": 1}})
    (folder / "manifest.json").write_text(wrong.model_dump_json())
    assert main(["report", str(folder)]) == 1
    assert "the ledgers count" in capsys.readouterr().err
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    (folder / manifest.ledgers[0].name).unlink()
    assert main(["report", str(folder)]) == 1
    assert "is missing" in capsys.readouterr().err
    (folder / "manifest.json").unlink()
    assert main(["report", str(folder)]) == 1


def test_more_sources_than_are_held_lose_their_names_only(monkeypatch):
    monkeypatch.setattr(survey, "MAX_NAMES", 1_000)
    tallies, number = Tallies(), 3_000
    for start in range(0, number, 500):
        names = ["large" if n % 100 == 1 else f"{n}.txt" for n in range(start, start + 500)]
        tokens = pa.array([1000 if name == "large" else 1 for name in names])
        status = pa.array(["train" if n % 2 else "too_short" for n in range(500)])
        batch = pa.record_batch({"status": status, "text_bytes": tokens, "num_tokens": tokens})
        tallies.add(pa.array(names), survey.tally_columns(batch))
    large, (name, others) = tallies.largest(tallies.by_name, 1)
    assert large == ("large", Tally(30, 30_000, 30, 30_000))
    assert name == f"({number - 30:,} others)"
    assert (others.read, others.kept_tokens) == (number - 30, number // 2 - 30)
    assert len(tallies.by_name) <= 1_000


def test_the_report_answers_whether_to_train(content):

    def answer(**totals):
        manifest = content.manifest.model_copy(update={"totals": content.manifest.totals | totals})
        return readiness(replace(content, manifest=manifest, statuses=statuses))

    statuses = content.statuses
    says(readiness(content), "Not yet")
    says(readiness(content), f"{content.manifest.totals['kept_held_out']} held-out documents")
    assert readiness(content) in glance(content)
    enough = {"kept_train": 900, "kept_held_out": 200}
    says(answer(**enough, text_bytes=3 * content.kept_tally.text_bytes), "too_short")
    statuses = {"train": content.kept_tally}
    says(answer(**enough), "900 training documents")
    message = answer(kept_train=15, kept_held_out=199)
    says(message, "15 training documents", "batch of 16")
    says(message, "199 held-out documents")


def test_the_report_and_inspect_show_lost_documents_and_unknown_tokens(content, prepared, tmp_path, capsys):
    shutil.copytree(prepared[0], tmp_path / "shards")
    totals = content.manifest.totals | {"lost": 990, "unknown_tokens": content.manifest.totals["num_tokens"]}
    manifest = content.manifest.model_copy(update={"totals": totals})
    (tmp_path / "shards" / MANIFEST).write_text(manifest.model_dump_json())
    main(["inspect", str(tmp_path / "shards"), "--documents", "0"])
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", str(tmp_path / "shards"), "--documents", "-1"])
    answer = capsys.readouterr()
    says(answer.err, "--documents -1", "at least 0")
    for shown in ("\n".join(glance(replace(content, manifest=manifest))), answer.out):
        says(shown, "about 990 lost")
        says(shown, "(100.0%) stand for words that the tokenizer does not know")


def test_the_report_names_folders_its_totals_close_and_nothing_to_tell_makes_a_short_page(tmp_path, capsys):
    rows = [Row(f"word{n} " * 40, source=f"logs/{n}.txt") for n in range(60)] + [Row("a b " * 40, source="all.jsonl")]
    rows += [Row(f"x{n} " * 40, source=f"top{n}/a/b.txt") for n in range(30)]
    manifest = write_prepared(tmp_path / "shards", [rows])
    sources = gather(tmp_path / "shards").sources()
    assert (sources[0][0], sources[0][1].read) == ("logs/", 60)
    assert {"all.jsonl", "top12/"} <= {name for name, _ in sources}
    assert (sources[-1][0], len(sources)) == ("(12 others)", 21)
    assert sum(tally.read for _, tally in sources) == manifest.totals["read"]
    assert main(["report", str(tmp_path / "shards"), "--output", str(tmp_path / "page")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page" / "report.html")
    page = (tmp_path / "page" / "report.html").read_text()
    says(page, "Every document", "kept")
    assert re.findall(r'<section id="(\w+)"', page) == ["lengths", "reasons", "sources", "examples"]


def test_inspect_shows_reasons_and_names(prepared, capsys):
    for more in ([], ["--document", "web.tar!page.html"], ["--document", "<script>alert(1)</script>\u202e.jsonl"]):
        main(["inspect", str(prepared[0]), "--documents", "0", *more])
        for text in capsys.readouterr():
            assert not {unicodedata.category(sign) for sign in text if sign != "\n"} & {"Cc", "Cf", "Cs"}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """61 images of two sizes with three labels, one of them hostile; two that are no images."""
    labels = ["cat", "dog", HOSTILE]
    files = {f"{labels[n % 3]}/{n}.png": png(n, (40, 30) if n % 4 else (20, 21)) for n in range(60)}
    files |= {"cat/\u202ebad.png": b"x", f"{HOSTILE}/bad.png": b"x", "cat/many.gif": animated()}
    return prepare_media(tmp_path_factory.mktemp("images"), "images", files)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    files = {f"{n % 2}_{n}.wav": sound(tone(0.2 + 0.05 * n, number=n)) for n in range(12)}
    files["0_silent.wav"] = sound(np.zeros((9000, 1)))
    return prepare_media(tmp_path_factory.mktemp("clips"), {"kind": "audio", "label": r"^(\d)"}, files)


def pictures_of(page):
    data = [attrs["src"].partition(",")[2] for name, attrs in page.elements if name == "img"]
    return [Image.open(io.BytesIO(base64.b64decode(text))) for text in data]


def test_images_are_shown_by_thumbnails_and_labels(images, tmp_path, capsys):
    folder, manifest = images
    content = gather(folder)
    assert content.counts()["Kept images by label"] == manifest.labels == {"cat": 21, "dog": 20, HOSTILE: 20}
    assert [(reason, tally.read) for reason, _, tally in content.reasons()] == [("not_an_image", 2)]
    page = checked(write_corpus_page(folder, tmp_path).read_text())
    assert "img-src" in page.policy()
    assert 10 <= len(pictures_of(page)) <= 24
    assert all(picture.size in ((40, 30), (20, 21)) for picture in pictures_of(page))
    assert [part for part in (HOSTILE, "Number of images by pixels") if part not in page.text] == []
    assert "oken" not in page.text
    assert (manifest.notes, "share text" in page.text) == ({"first_frame": 1}, False)
    row = ShardSet(folder, "train").take(np.array([5])).to_pylist()[0]
    assert main(["inspect", str(folder)]) == 0
    message = capsys.readouterr().out
    says(message, "63 images read", "61 kept", "2 not_an_image")
    says(message, "images", "3 labels")
    assert "pixels," in message
    assert "tokenizer" not in message
    assert main(["inspect", str(folder), "--document", f"{row['source']}:0"]) == 0
    message = capsys.readouterr().out
    parts = (f"{row['width']} x {row['height']} pixels", f"label {row['label']!r}")
    assert [part for part in parts if part not in message] == []
    data = png(1, (300, 200))  # a thumbnail is encoded again
    marked = data[:33] + b"\x00\x00\x00\x04tEXthtml\xf1\xf1\xf1\xf1" + data[33:]
    uri = thumbnail({"image": marked})
    assert uri is None or b"html" not in base64.b64decode(uri.partition(",")[2])
    uri = thumbnail({"image": data})
    assert Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).size == (96, 64)
    assert thumbnail({"image": data[:500]}) is thumbnail({"image": b"GIF89a"}) is None


def test_clips_are_shown_by_their_energies(clips, tmp_path, capsys):
    folder, manifest = clips
    statuses = gather(folder).statuses
    frames = [1 + (int(16_000 * (0.2 + 0.05 * n)) - 400) // 160 for n in range(12)]
    assert statuses["train"].kept_tokens + statuses["held-out"].kept_tokens == sum(frames)
    page = checked(write_corpus_page(folder, tmp_path).read_text())
    pictures = pictures_of(page)
    assert len(pictures) >= 5
    grey = np.asarray(pictures[0].convert("L"))
    assert grey.min() < 10 < 245 < grey.max()
    assert "silent" in page.text
    assert f"Largest clip {manifest.totals['longest_tokens']} frames" in page.text
    assert main(["inspect", str(folder), "--document", "0_silent.wav"]) == 0
    message = capsys.readouterr().out
    says(message, "dropped: silent", "9000 samples", "0")
    says(message, "bytes", "not decoded")
    assert main(["inspect", str(folder)]) == 0
    assert " frames\n    label " in capsys.readouterr().out


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """60 premises with one to four hypotheses of growing length; some pairs are dropped."""
    numbers = [(n, k) for n in range(60) for k in range(1 + n % 4)]
    rows = [make_pair(f"Premise {n} " + "word " * (n % 40), f"{'It is so. ' * k} {k}", k % 3) for n, k in numbers]
    rows += [make_pair("x", "<script>alert(1)</script>", "-")] * 3 + [make_pair("<script>alert(2)</script>", "y", 0)]
    return prepare_rows(tmp_path_factory.mktemp("report") / "pairs", "pairs", rows)


def test_lengths_labels_and_numbers_are_those_of_the_shards(pairs, tmp_path, capsys):
    folder, manifest = pairs
    content = gather(folder)
    lengths, numbers = {}, Counter()
    for split in ("train", "held-out"):
        shards = ShardSet(folder, split)
        for row in shards.take(np.arange(shards.num_documents)).to_pylist():
            sizes = np.diff([*row["starts"], row["num_tokens"]]).tolist()
            for size, label in zip(sizes, row["labels"], strict=True):
                lengths.setdefault("premise" if label < 0 else LABELS[label], Counter())[size] += 1
            numbers[len(sizes) - 1] += 1
    assert (content.texts.lengths, content.texts.hypotheses) == (lengths, numbers)
    named = {f"{number} hypotheses": count for number, count in numbers.items()}
    named = {"Premises by number of hypotheses": named, "Kept hypotheses by label": manifest.labels}
    assert content.counts() == named
    page = checked(write_corpus_page(folder, tmp_path).read_text()).text
    for message in ("Lengths of texts in tokens", "Premises by number of hypotheses", "no_gold_label", "entailment: "):
        assert message in page
    assert "spans up to" not in page
    assert "Histogram" not in page
    assert main(["inspect", str(folder), "--documents", "2"]) == 0
    message = capsys.readouterr().out
    says(message, "rows of pairs")
    assert len(re.findall(r"^    premise +\d+ tokens  \S", message, re.MULTILINE)) == 2
    entry = ShardSet(folder, "train").take(np.array([3]))["id"].to_pylist()[0].hex()
    assert main(["inspect", str(folder), "--document", entry]) == 0
    assert "    entailment " in capsys.readouterr().out


def test_sentences_have_lengths_but_no_labels(tmp_path, capsys):
    rows = [{"text": f"Sentence {n}. " * (n % 5)} for n in range(40)]
    folder, manifest = prepare_rows(tmp_path / "s", "sentences", rows)
    content = gather(folder)
    assert (manifest.dropped, content.counts()) == ({"empty": 8}, {})
    assert {kind: lengths.total() for kind, lengths in content.texts.lengths.items()} == {"sentence": 32}
    assert "one text a row" in write_corpus_page(folder).read_text()
    held_out, _ = prepare_rows(tmp_path / "h", "sentences", rows, validation_fraction=1 - 1e-9)
    for shards in (folder, held_out):
        assert main(["inspect", str(shards)]) == 0
        assert "    sentence " in capsys.readouterr().out
