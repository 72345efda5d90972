"""What a search does not read, and what a preparation tells of it in the end."""

import codecs
import gzip
import os
import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import files, outcomes, read_all, write_records
from mediafiles import spread
from messages import says

from declutr.pipeline.config import identity
from declutr.pipeline.job.outcome import lines_hint, nothing_kept, summary, too_many_failed
from declutr.pipeline.job.output import plan_of
from declutr.pipeline.job.units import UnitReader, hash_unit, plan_units, with_file_states
from declutr.pipeline.job.worker import write_unit
from declutr.pipeline.prepare import problems
from declutr.pipeline.readers.input_state import digest_parts
from declutr.pipeline.readers.planning import file_parts
from declutr.pipeline.readers.skipped import Skipped, describe_skipped
from declutr.pipeline.shards.manifest import build_manifest, load_manifest
from declutr.report.corpus import gather, glance


@contextmanager
def without_rights():
    """Takes the rights of another user for a while, because root may read everything."""
    before = os.geteuid()
    os.seteuid(before or 65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def folder():
    """A folder that every user may read; pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name).resolve()
        path.chmod(0o755)
        (path / "a.txt").write_text("read")
        yield path
        for below in (path, *path.rglob("*")):  # so that whoever made it can remove it
            if below.is_dir() and not below.is_symlink():
                below.chmod(0o755)


def search(*paths, **changes):
    """Outcomes of all records, the kinds that were skipped, the problems."""
    skipped, corpus = Skipped(), files(*paths, **changes)
    with without_rights():
        problems = file_parts(corpus, 1 << 20, skipped)[1]
        records = [] if problems else outcomes(read_all(corpus))
    return records, {kind: (skip.files, skip.example) for kind, skip in skipped.kinds().items()}, problems


@pytest.mark.parametrize("pattern", ["", "*", "**/*.txt", "*/b.txt"])
def test_a_folder_that_cannot_be_listed_is_a_failure(folder, pattern):
    spread(folder, {"sub/b.txt": b"not read", "z/b.txt": b"deep"})
    (folder / "sub").chmod(0)
    records, skipped, problems = search(folder / pattern, folder / "a.txt")
    twice = {} if pattern == "*/b.txt" else {"second names of files, and links to them": (1, "a.txt")}
    if pattern == "*":  # folders that match are not searched, whether they could be or not
        assert skipped == {"folders that match a pattern": (2, "sub"), **twice}
        return
    assert (problems, records[0], skipped) == ([], ("a.txt", "read"), {"unreadable": (1, "sub"), **twice})
    assert ("sub", "unreadable") in records


@pytest.mark.parametrize("mode", [0, 0o111])
@pytest.mark.parametrize("pattern", ["sub", "sub/*.txt"])
def test_a_folder_that_was_named_must_be_readable(folder, pattern, mode):
    (folder / "sub").mkdir(mode)
    says(*search(folder / pattern, folder / "a.txt")[2], "cannot be listed", "Permission denied")


def test_links_and_files_that_cannot_be_read_are_failures(folder):
    for name, target in (("gone.txt", "/nowhere/at/all.txt"), ("gone", "/nowhere/at/all"), ("picture.png", "/nowhere")):
        (folder / name).symlink_to(target)
    (folder / "loop.jsonl").symlink_to("loop.jsonl")
    (folder / "private.txt").write_text("private")
    (folder / "private.txt").chmod(0)
    records, skipped, problems = search(folder)
    lost = [(name, "unreadable") for name in ("gone", "gone.txt", "loop.jsonl", "private.txt")]
    assert (records, problems) == ([("a.txt", "read"), *lost], [])
    assert skipped == {"unreadable": (4, "gone"), ".png": (1, "picture.png")}
    (problem,) = search(folder / "private.txt")[2]
    assert "Permission denied" in problem


def test_pipes_and_devices_are_never_opened_and_a_name_that_is_not_utf8_is_a_problem_behind_a_link_too(folder):
    os.mkfifo(folder / "pipe.txt")
    (folder / "link").symlink_to(spread(folder / "other", {"b.txt": b"once"}))
    (folder / "other" / "back").symlink_to(folder)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "s.txt"))
        records, skipped, problems = search(folder)
    assert (records, problems) == ([("a.txt", "read"), ("other/b.txt", "once")], [])
    assert skipped == {"links to folders": (2, "link"), "pipes, sockets and devices": (2, "pipe.txt")}
    says(*file_parts(files(folder / "pipe.txt"), 1 << 20)[1], "pipe", "write its content to a file")
    (folder / "named").symlink_to(spread(folder / os.fsdecode(b"\xff"), {"b.txt": b"not read"}))
    says(*file_parts(files(folder / "named"), 1 << 20)[1], "corpus.paths", "b.txt", "not UTF-8", "rename")


def test_files_of_other_kinds_are_counted_by_their_endings(folder):
    names = ["b.xml", "deep/c.XML", "d.svg", "e.rtf", "f.zip", "README", "g.json", "h.bad ending", "j\n.odd"]
    names += [".hidden.xml", "k.md", os.fsdecode(b"\xff.png")]
    spread(folder, dict.fromkeys(names, b"text") | {"i.sql.gz": gzip.compress(b"sql")})
    records, skipped, problems = search(folder)
    assert (records, problems) == ([("README", "text"), ("a.txt", "read"), ("k.md", "text")], [])
    kinds = [".svg", ".json", ".odd", ".rtf", ".png", ".sql", ".zip", "others"]
    assert {kind: number for kind, (number, _) in skipped.items()} == {".xml": 2} | dict.fromkeys(kinds, 1)
    assert skipped[".xml"] == (2, "b.xml")


def test_content_decides_without_an_ending_and_for_json(folder):
    rows = b'{"text": "one"}\n{"text": "two"}\n'
    contents = {"LICENSE": b"prose", "rows": rows, "run": b"#!/bin/sh\n", "page": b" <svg>", "core": b"\x7fELF\0"}
    contents |= {"empty": b"", "r.json": codecs.BOM_UTF8 + rows, "g.rst": b"Title\n====="}
    contents |= {"d.json": b'{\n "text": "over lines",\n "n": [\n1]}\n'}
    contents |= {"o.json": b'{"name": "x"}', "alone/o.json": b'{"name": "x"}'}  # the first is data, as r.json beside it
    contents |= {"alone/p.json": b'{\n "name": {"text": "x"}}'}
    contents |= {"late/l.json": b'{"pad": "%s", "text": "late"}\n' % (b"x" * 100_000)}
    contents |= {"array.json": b'\xef\xbb\xbf [{"text": "a"},\n {"text": "b"}]'}
    spread(folder, contents | {f"{name}.gz": gzip.compress(content) for name, content in contents.items()})
    records, skipped, problems = search(folder)
    twice = [("LICENSE", "prose"), ("g.rst", "Title\n====="), ("r.json", "one"), ("r.json", "two")]
    twice += [("rows", "one"), ("rows", "two"), ("d.json", "over lines"), ("o.json", "no_text_field")]
    twice += [("late/l.json", "late"), ("array.json", "a"), ("array.json", "b")]
    assert sorted(records) == sorted([("a.txt", "read"), *twice, *((f"{name}.gz", text) for name, text in twice)])
    assert (skipped, problems) == ({"no ending": (8, "core"), ".json": (4, "alone/o.json")}, [])
    assert outcomes(read_all(files(folder / "o.json"))) == [("o.json", "no_text_field")]  # named, so read
    named = spread(folder / "both", {"o.json": b'{"name": "x"}'}) / "o.json"
    for paths in ((named, named.parent), (named.parent, named)):
        assert outcomes(read_all(files(*paths))) == [("o.json", "no_text_field")]


def test_what_programs_leave_beside_data_is_named_and_read_only_by_name(folder):
    write_records(folder / "part.0.parquet", [{"text": "row"}])
    for path in (folder / "_metadata", folder / "_common_metadata"):
        pq.write_metadata(pa.schema({"text": pa.string()}), path)
    cache = folder / "cache-09d3226230a1b6bd.arrow"
    with pa.ipc.new_stream(cache, pa.schema({"text": pa.string()})) as stream:
        stream.write_batch(pa.record_batch({"text": ["copy"]}))
    names = "_SUCCESS", "_started_12", "_delta_log/0.json", "__MACOSX/a.txt", "dataset_dict.json"
    spread(folder, dict.fromkeys(names, b'{"text": "x"}\n'))
    records, skipped, problems = search(folder)
    assert (records, problems) == ([("a.txt", "read"), ("part.0.parquet", "row")], [])
    counts = {kind: number for kind, (number, _) in skipped.items()}
    assert counts == {"left by programs": 6, "caches of datasets": 1, "dataset_dict.json": 1}
    assert outcomes(read_all(files(cache))) == [(cache.name, "copy")]


def test_excluded_files_are_counted_and_not_read_and_a_folder_of_nothing_else_says_what_is_in_it(folder, caplog):
    spread(folder, {name: name.encode() for name in ("drafts/deep/b.txt", "c.md", "d.pdf", "kept/drafts.txt")})
    records, skipped, problems = search(folder, exclude=["drafts/*", "none/*", "*.md", "*.pdf"])
    says(caplog.text, "corpus.exclude", "no file", "matches none/*")
    assert (records, problems) == ([("a.txt", "read"), ("kept/drafts.txt", "kept/drafts.txt")], [])
    assert skipped == {"excluded by corpus.exclude": (3, "c.md")}
    assert search(folder / "c.md", exclude=["*.md"])[0] == [("c.md", "c.md")]  # named, so read
    spread(folder / "other", {"a.xml": b"read"})
    says(search(folder / "other")[2], "no file", "1 .xml")
    says(search(folder / "other" / "a.xml")[2], "trafilatura")


def test_one_line_says_what_is_not_read_and_what_to_do_of_a_bounded_number_of_kinds():
    few, many = Skipped(), Skipped()
    for name in ("a.xml", "b.html", "c.rtf", "d.zip", "e.json", "f.xyz"):
        few.add_file(name)
    advice = ("trafilatura", "text_file", "convert", "unpack", "pypdfium2", "corpus.text_field")
    says(describe_skipped(few.kinds()), "1 .xml (such as 'a.xml')", *advice)
    for number in range(1000):
        many.add_file(f"a.x{number}")
    assert sorted(skip.files for skip in many.kinds().values()) == [1] * 50 + [950]


def test_units_are_those_of_the_same_files_when_nothing_is_lost(folder):
    before = plan_units(files(folder), 1)[0]
    (folder / "b.png").write_text("x")
    (folder / "link").symlink_to(folder)
    (unit,) = plan_units(files(folder), 1)[0]
    assert [hash_unit(unit)] == [hash_unit(unit) for unit in before]
    (folder / "gone.txt").symlink_to("nowhere")
    assert digest_parts(plan_units(files(folder), 1)[0][0].parts) == digest_parts(unit.parts) is not None


@pytest.mark.parametrize("change", ["gone", "shorter", "longer"])
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet", "arrow", "tar", "jsonl.gz"])
def test_a_file_that_changes_after_it_was_found_loses_nothing_without_a_failure(tmp_path, suffix, change):
    texts = [f"text {n}" for n in range(200)]
    path = write_records(tmp_path / f"a.{suffix}", [{"text": text} for text in texts], 20)
    corpus, data = files(path), path.read_bytes()
    units, _ = plan_units(corpus, 0.001)
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if change == "shorter" else data + b"\nmore")
    found = [outcome for unit in units for _, outcome in outcomes(UnitReader(unit, corpus))]
    read = [outcome for outcome in found if outcome in texts]
    assert len(read) == len(set(read))
    assert change == "longer" or "unreadable" in found
    assert len(read) == len(texts) or len(found) > len(read)


@pytest.fixture
def made(tmp_path, make_config, output):
    """A folder of text, a link that leads nowhere and files of no format, prepared without Ray."""
    folder, tokenizer = output
    lines = [" ".join(f"word{n}{i}" for i in range(40)) for n in range(8)] + [""] * 30
    corpus = spread(tmp_path / "corpus", {"a.txt": "\n".join(lines).encode()})
    (corpus / "gone.jsonl").symlink_to("nowhere")

    def make(*others):
        spread(corpus, dict.fromkeys(others, b"<p>not read</p>"))
        config, skipped = make_config(corpus), Skipped()
        (unit,) = with_file_states(plan_units(config.corpus, config.unit_mib, skipped)[0])
        sidecar, plan = write_unit(unit, folder, config, tokenizer), plan_of(config, [unit], skipped.kinds())
        manifest = build_manifest([sidecar], tokenizer, config.geometry, identity(config), "", plan.skipped)
        (folder / "manifest.json").write_text(manifest.model_dump_json())
        (folder / "plan.json").write_text(plan.model_dump_json())
        return folder, config, sidecar, manifest

    return make


def test_skipped_files_are_in_manifest_message_and_report(made, caplog):
    _, config, sidecar, manifest = made()
    assert "not read" not in summary(manifest.model_copy(update={"skipped": {}}), "out")
    says(nothing_kept(sidecar.counts.model_copy(update={"kept": 0}), config), "none of 38")
    folder, config, sidecar, manifest = made("b.xml", "c.xml")
    assert {kind: skip.files for kind, skip in load_manifest(folder).skipped.items()} == {".xml": 2, "unreadable": 1}
    counts = sidecar.counts
    assert (counts.read, counts.kept, counts.failed) == (38, 8, {"unreadable": 1})
    says(summary(manifest, "out"), "2 .xml", "'b.xml'", "1 unreadable", "'gone.jsonl'")
    says("\n".join(glance(gather(folder))), "2 .xml", "trafilatura", "text_file")
    assert "gone.jsonl" in str(too_many_failed(counts, sidecar.failures, 0.01, "documents", sidecar.losses))
    assert too_many_failed(counts, sidecar.failures, 0.03, "documents", sidecar.losses) is None
    assert not problems(config)
    says(caplog.text, "2 .xml", "'b.xml'")


LIKELY = [("auto", ["a.txt"], {"empty": 30, "too_short": 30}), ("auto", ["a.jsonl", "b.TXT.gz"], {"too_short": 60})]
LIKELY += [("text", ["a.log"], {"too_short": 60})]
UNLIKELY = [("auto", ["a.txt"], {"empty": 50}), ("auto", ["a.txt"], {"duplicate": 90})]
UNLIKELY += [("auto", ["a.jsonl", "b.tar", "c.md", None], {"too_short": 90})]
UNLIKELY += [(fixed, ["a.txt"], {"too_short": 90}) for fixed in ("text_file", "jsonl")]


@pytest.mark.parametrize(
    ("fixed", "sources", "dropped", "told"), [(*c, True) for c in LIKELY] + [(*c, False) for c in UNLIKELY]
)
def test_advice_where_lines_are_most_likely_no_documents(fixed, sources, dropped, told):
    corpus = files("x", format=fixed).model_dump(mode="json")
    hint = lines_hint(100, dropped, {"corpus": corpus, "content": {"kind": "documents"}}, sources)
    assert bool(hint) == told
    assert lines_hint(100, dropped, {"corpus": corpus, "content": {"kind": "sentences"}}, sources) is None
    remedy = "text_file" if fixed == "text" else "auto_text_file"
    assert not told or f"set corpus.format={remedy}" in hint
