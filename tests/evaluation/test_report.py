"""What a report counts, against the folder it was made from; no browser."""

import gzip
import json
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from messages import says
from PIL import Image
from prepared import Row, write_prepared

from declutr.cli.main import main
from declutr.evaluation.report.charts import Histogram, ReferenceLine, Series, count_ticks, short_number
from declutr.evaluation.report.content import gather, lengths_chart
from declutr.evaluation.report.examples import find_clusters
from declutr.evaluation.report.header import header, readiness
from declutr.evaluation.report.markup import Html, markup, tag, visible
from declutr.report.corpus import write_corpus_page
from declutr.evaluation.report.survey import BINS_PER_OCTAVE, NUM_BINS, survey
from declutr.evaluation.report.tally import MAX_NAMES, Tallies, Tally, tally_columns
from declutr.pipeline.shards.ledger import SCHEMA, ledger_entries
from declutr.pipeline.shards.manifest import load_manifest


@pytest.fixture(scope="module")
def content(prepared):
    return gather(prepared[0])


def entries(folder):
    return [entry for path in sorted((folder / "ledger").glob("*.arrow")) for entry in ledger_entries(path)]


def test_fates_are_those_of_the_ledgers_to_the_byte(prepared, content):
    rows = entries(prepared[0])
    for status, tally in content.statuses.items():
        mine = [row for row in rows if row.status == status]
        assert (tally.read, tally.text_bytes) == (len(mine), sum(row.text_bytes for row in mine))
    totals = prepared[1].totals
    assert sum(tally.read for tally in content.statuses.values()) == totals["read"] == len(rows)
    kept = content.kept_tally
    assert (kept.kept, kept.kept_tokens) == (totals["kept"], totals["num_tokens"])
    assert [(reason, role) for reason, role, _ in content.reasons()][:2] == [
        ("too_short", "short"),
        ("duplicate", "dropped"),
    ]
    assert ("invalid_json", "failed") in [(reason, role) for reason, role, _ in content.reasons()]


def test_sources_are_counted_by_archive_and_file(prepared, content):
    rows = entries(prepared[0])
    found = dict(content.sources())
    assert set(found) == {"web.tar", "a.jsonl", "b.jsonl", "<script>alert(1)</script>\u202e.jsonl"}
    mine = [row for row in rows if row.source == "b.jsonl"]
    expected = [row for row in mine if row.row is not None]
    assert (found["b.jsonl"].read, found["b.jsonl"].kept) == (len(mine), len(expected))
    assert found["b.jsonl"].kept_tokens == sum(row.num_tokens for row in expected)
    assert {name: tally.read for name, tally in content.languages()} == {
        "en": 63,
        "de": 5,
        "xx": 1,
        "not determined": 2,
    }


def test_lengths_fall_on_the_right_side_of_the_limits(prepared, content):
    rows = [row for row in entries(prepared[0]) if row.num_tokens is not None]
    chart = lengths_chart(content)
    assert chart.totals().sum() == len(rows)
    limit = prepared[1].geometry.min_document_tokens
    (index,) = np.flatnonzero(chart.edges == limit)
    short = next(one for one in chart.series if one.role == "short")
    kept = next(one for one in chart.series if one.role == "kept")
    assert short.counts[index:].sum() == kept.counts[:index].sum() == 0
    assert chart.totals()[:index].sum() == sum(row.num_tokens < limit for row in rows)
    bands = sum(content.found.bands.values())
    assert bands[:, 0].tolist() == [
        sum(row.num_tokens < 16 for row in rows),
        0,
        sum(row.num_tokens >= limit for row in rows),
    ]
    assert bands[:, 1].sum() == sum(row.num_tokens for row in rows)


@pytest.mark.parametrize("limit", [32, 2048, 1000, 7])
def test_a_length_next_to_the_limit_is_in_the_bin_next_to_it(limit):
    from declutr.evaluation.report.survey import Survey

    found = Survey(limit, [limit], 0)
    found._measure(pa.array([limit - 1, limit, None, limit + 1], pa.int64()), np.zeros(4, np.int64), ["train"])
    assert found.lengths["train"][NUM_BINS // 2 - 1] == 1
    assert found.lengths["train"][NUM_BINS // 2 : NUM_BINS // 2 + BINS_PER_OCTAVE].sum() == 2
    assert found.bin_edges()[NUM_BINS // 2] == limit


def test_clusters_have_their_members(content):
    clusters = content.clusters
    assert sorted(clusters.sizes.tolist()) == [3, 7]
    assert clusters.by_size() == [("2", 0), ("3", 1), ("4", 0), ("5–8", 1)]
    largest, other = clusters.largest
    assert (largest.size, largest.kept.source, largest.kept.offset) == (7, "web.tar!page.html", 3)
    assert [(copy.source, copy.offset) for copy in other.copies] == [("b.jsonl", 6), ("b.jsonl", 7)]


def test_a_kept_copy_that_is_nowhere_is_told(tmp_path):
    text = "one two three four five six seven " * 8
    units = [[Row(text), Row(text, "duplicate", detail="00009:4 is kept, similarity 1.00")]]
    manifest = write_prepared(tmp_path / "out", units)
    (cluster,) = find_clusters(tmp_path / "out", survey(tmp_path / "out", manifest)).largest
    assert cluster.kept is None
    says(write_report(tmp_path / "out").read_text(), "not in", "ledgers")


def test_matches_are_counted_by_evaluation_set(content):
    (match,) = content.found.matches.values()
    assert (match.name, match.kept, match.dropped, match.most) == ("sts12", 1, 1, 3)


def test_examples_are_of_their_reason_and_carry_their_text(prepared, content):
    folder = prepared[0]
    files = sorted((folder / "rejected").iterdir())
    written = [json.loads(line) for path in files for line in gzip.decompress(path.read_bytes()).splitlines()]
    for reason, examples in content.rejected.items():
        assert 1 <= len(examples) <= 3
        for example in examples:
            (same,) = [one for one in written if (one["source"], one["offset"]) == (example.source, example.offset)]
            assert same["reason"] == reason
            assert example.text == same["text"][:600]
    assert len(content.kept) == len({example.offset for example in content.kept})
    texts = {(row.source, row.offset) for row in entries(folder) if row.status == "train"}
    assert {(example.source, example.offset) for example in content.kept} <= texts


def test_without_rejected_texts_there_are_places(tmp_path):
    units = [[Row("word " * 60), Row("few", "too_short")]]
    write_prepared(tmp_path / "out", units, write_rejected=False)
    page = write_report(tmp_path / "out").read_text()
    assert "a.jsonl:1" in page
    assert "write_rejected: true" in page
    assert "few" not in re.sub(r"<style>.*?</style>", "", page)


def test_the_same_folder_gives_the_same_bytes(prepared, tmp_path):
    for name in ("first", "second"):
        write_report(prepared[0], tmp_path / name)
    first, second = (
        sorted(path for path in (tmp_path / name).rglob("*") if path.is_file()) for name in ("first", "second")
    )
    assert [path.name for path in first] == [path.name for path in second]
    assert {"report.html", "lengths.png", "reasons.png", "sources.png", "languages.png", "clusters.png"} == {
        path.name for path in first
    }
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_charts_are_pictures_with_something_on_them(prepared, tmp_path):
    write_report(prepared[0], tmp_path)
    for path in (tmp_path / "charts").iterdir():
        with Image.open(path) as picture:
            assert min(picture.size) > 150
            assert len(picture.convert("RGB").getcolors(1_000_000)) > 10


def test_ledgers_that_contradict_the_manifest_are_an_error(tmp_path, capsys):
    folder = tmp_path / "out"
    manifest = write_prepared(folder, [[Row("word " * 60), Row("few", "too_short")]])
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


def test_a_corpus_with_nothing_to_tell_has_a_short_page(tmp_path, capsys):
    write_prepared(tmp_path / "out", [[Row("word " * 60)]])
    assert main(["report", str(tmp_path / "out"), "--output", str(tmp_path / "page")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page" / "report.html")
    page = (tmp_path / "page" / "report.html").read_text()
    says(page, "Every document", "kept")
    assert not {"duplicates", "contamination", "languages", "estimate"} & set(re.findall(r'<section id="(\w+)"', page))


def test_hostile_text_is_text():
    assert markup("<a href='x'>&\"") == "&lt;a href=&#x27;x&#x27;&gt;&amp;&quot;"
    assert visible("a\x00b\u202ec\x9bd\n\te\ud800f") == "a⟨U+0000⟩b⟨U+202E⟩c⟨U+009B⟩d\n    e⟨U+D800⟩f"
    assert visible("न्\u200dय 👩\u200d🔬 日本語") == "न्\u200dय 👩\u200d🔬 日本語"
    assert tag("p", "<b>", Html("<i></i>"), class_='"><script>') == (
        '<p class="&quot;&gt;&lt;script&gt;">&lt;b&gt;<i></i></p>'
    )


def batch_of(names, tokens):
    columns = {field.name: pa.nulls(len(names), field.type) for field in SCHEMA}
    columns["status"] = pa.array(["train" if n % 2 else "too_short" for n in range(len(names))])
    columns["text_bytes"], columns["num_tokens"] = pa.array(tokens, pa.int64()), pa.array(tokens, pa.int64())
    return pa.record_batch(columns), pa.array(names)


@pytest.mark.slow
def test_more_sources_than_are_held_lose_their_names_only():
    tallies = Tallies()
    number = 3 * MAX_NAMES
    for start in range(0, number, 50_000):
        names = ["large" if n % 100 == 1 else f"{n}.txt" for n in range(start, start + 50_000)]
        batch, column = batch_of(names, [1000 if name == "large" else 1 for name in names])
        tallies.add(column, tally_columns(batch))
    large, (name, others) = tallies.largest(tallies.all(), 1)
    assert large == ("large", Tally(3_000, 3_000_000, 3_000, 3_000_000))
    assert name == f"({number - 3_000:,} others)"
    assert (others.read, others.kept_tokens) == (number - 3_000, number // 2 - 3_000)
    assert len(tallies.all()) <= MAX_NAMES


def test_axes_have_round_values_that_reach_far_enough():
    for largest in (0, 1, 3, 4, 7, 99, 1234, 5_000_001):
        ticks = count_ticks(largest)
        assert ticks[0] == 0
        assert ticks[-1] >= largest
        assert 2 <= len(ticks) <= 6
    assert [short_number(value) for value in (0, 999, 2_500, 20_000, 3_000_000)] == ["0", "999", "2.5k", "20k", "3M"]
    chart = Histogram(
        "x", "", "", np.array([10.0, 100.0, 1000.0]), [Series("kept", "", np.array([0, 5]))], [ReferenceLine(20, "")]
    )
    assert chart.trimmed().edges.tolist() == [10, 100, 1000]
    assert chart.place(100) == pytest.approx(0.5)
    assert chart.axis_ticks() == [10, 20, 50, 100, 200, 500, 1000]


def test_the_manifest_is_left_alone(prepared):
    before = (prepared[0] / "manifest.json").stat().st_mtime
    gather(prepared[0])
    assert load_manifest(prepared[0]) == prepared[1]
    assert (prepared[0] / "manifest.json").stat().st_mtime == before


def test_the_report_answers_whether_to_train(content):
    """Each obstacle is named with its remedy; without one, the tokens that a run would read."""
    totals = content.manifest.totals
    told = readiness(content)
    says(told, "Not yet")
    says(told, f"{totals['kept_held_out']} held-out documents")
    assert told in header(content)
    enough = content.manifest.model_copy(update={"totals": totals | {"kept_train": 900, "kept_held_out": 200}})
    kept = replace(content, manifest=enough, statuses={"train": content.kept_tally})
    says(readiness(kept), "900 training documents")
    read = content.coverage
    says(readiness(kept), "three passes", f"{100 * read.share:.1f}%")
    few = enough.model_copy(update={"totals": enough.totals | {"kept_train": 15, "kept_held_out": 199}})
    told = readiness(replace(kept, manifest=few))
    says(told, "15 training documents", "batch of 16")
    says(told, "199 held-out documents")
    lost = enough.model_copy(update={"totals": enough.totals | {"text_bytes": 3 * content.kept_tally.text_bytes}})
    says(readiness(replace(content, manifest=lost)), "too_short")
