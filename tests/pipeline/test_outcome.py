"""What a preparation tells in the end: what was not read, and when lines are most likely no documents."""

import pytest
from corpora import files
from messages import says

from declutr.pipeline.config import identity
from declutr.pipeline.job.outcome import lines_hint, nothing_kept, summary, too_many_failed
from declutr.pipeline.job.output import plan_of
from declutr.pipeline.job.units import plan_units, with_file_states
from declutr.pipeline.job.worker import write_unit
from declutr.pipeline.prepare import problems
from declutr.pipeline.readers.skipped import Skipped
from declutr.pipeline.shards.manifest import build_manifest, load_manifest
from declutr.report.corpus import gather, glance


@pytest.fixture
def made(tmp_path, make_config, output):
    """A folder of text, a link that leads nowhere and files of no format, prepared without Ray."""
    folder, tokenizer = output
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    lines = [" ".join(f"word{n}{i}" for i in range(40)) for n in range(8)] + [""] * 30
    (corpus / "a.txt").write_text("\n".join(lines))
    (corpus / "gone.jsonl").symlink_to("nowhere")

    def make(*others):
        for name in others:
            (corpus / name).write_text("<p>not read</p>")
        config = make_config(corpus)
        skipped = Skipped()
        (unit,) = with_file_states(plan_units(config.corpus, config.unit_mib, skipped)[0])
        sidecar = write_unit(unit, folder, config, tokenizer)
        plan = plan_of(config, [unit], skipped.kinds())
        manifest = build_manifest([sidecar], tokenizer, config.geometry, identity(config), "", plan.skipped)
        (folder / "manifest.json").write_text(manifest.model_dump_json())
        (folder / "plan.json").write_text(plan.model_dump_json())
        return folder, config, sidecar, manifest

    return make


def test_skipped_files_are_in_manifest_message_and_report(made, caplog):
    folder, config, sidecar, manifest = made("b.html", "c.html")
    assert {kind: skip.files for kind, skip in load_manifest(folder).skipped.items()} == {".html": 2, "unreadable": 1}
    assert sidecar.counts.read == 38 == sidecar.counts.kept + 29 + 1
    assert sidecar.counts.failed == {"unreadable": 1}
    told = summary(manifest, "out")
    says(told, "2 .html", "'b.html'", "1 unreadable", "'gone.jsonl'")
    page = "\n".join(glance(gather(folder)))
    says(page, "2 .html")
    assert "trafilatura" in page
    assert "text_file" in page
    assert "gone.jsonl" in str(too_many_failed(sidecar.counts, [sidecar], config))
    assert too_many_failed(sidecar.counts, [sidecar], config.model_copy(update={"max_error_rate": 0.03})) is None
    assert not problems(config)
    says(caplog.text, "2 .html", "'b.html'")


def test_a_search_that_read_everything_is_told_without_skipped_files(made):
    _, _, _, manifest = made()
    assert "not read" not in summary(manifest.model_copy(update={"skipped": {}}), "out")


@pytest.mark.parametrize(
    ("fixed", "sources", "dropped", "told"),
    [
        ("auto", ["a.txt"], {"empty": 30, "too_short": 30}, True),
        ("auto", ["a.jsonl", "b.TXT.gz"], {"too_short": 60}, True),
        ("text", ["a.log"], {"too_short": 60}, True),
        ("auto", ["a.txt"], {"empty": 50}, False),
        ("auto", ["a.txt"], {"duplicate": 90}, False),
        ("auto", ["a.jsonl", "b.tar", "c.md", None], {"too_short": 90}, False),
        ("text_file", ["a.txt"], {"too_short": 90}, False),
        ("jsonl", ["a.txt"], {"too_short": 90}, False),
    ],
)
def test_advice_where_lines_are_most_likely_no_documents(fixed, sources, dropped, told):
    corpus = files("x", format=fixed).model_dump(mode="json")
    hint = lines_hint(100, dropped, {"corpus": corpus, "content": {"kind": "documents"}}, sources)
    assert bool(hint) == told
    assert lines_hint(100, dropped, {"corpus": corpus, "content": {"kind": "sentences"}}, sources) is None
    assert not told or "set corpus.format=text_file" in hint


def test_no_document_kept_is_still_said_first(made):
    _, config, sidecar, _ = made()
    counts = sidecar.counts.model_copy(update={"kept": 0})
    says(nothing_kept(counts, config), "none of 38")
