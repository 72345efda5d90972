"""Texts of html, docx and pdf files: structure, reasons, bounds, the extra that reads them, folders of all kinds."""

import gzip
import signal
import zlib
from collections import Counter

import pytest
from corpora import files, outcomes, read_all, sentence, tar
from mediafiles import spread
from messages import says
from officefiles import KINDS, document, docx, paragraph, pdf, shown
from preparing import prepare_here

from declutr.adaptation.config import AdaptConfig
from declutr.adaptation.passages import all_documents, make_passages
from declutr.common import errors
from declutr.pipeline.job.output import Output, plan_of
from declutr.pipeline.job.units import UnitReader, hash_unit, plan_units
from declutr.pipeline.media.decoding import Limits
from declutr.pipeline.media.media_rows import document_texts
from declutr.pipeline.readers.corpus import Blob, Rules
from declutr.pipeline.readers.skipped import Skipped, describe_skipped
from declutr.pipeline.tokenizer.tokenization import load_tokenizer

PAGE = b"""<!DOCTYPE html><title>Intranet</title><nav>Home</nav><div role="navigation">Menu</div><script>x</script>
<h1>Leave<br>of absence</h1><p>Take <b>30</b>&nbsp;days.<!-- no --> Ask
first.<ul><li>Summer<ul><li><p>July</p></ul><li>Winter</ul><table><tr><th>Year<th>Days<tr><td>2024<td><p>thirty</p>
<p>one</p></table><table><tr><td><h2>Layout</h2>left<td>right</table><pre>\na  b\n c</pre><p>Tail<br>line
<footer>x</footer>"""
PAGE_TEXT = """# Leave of absence\n\nTake 30 days. Ask first.\n\n- Summer\n  - July\n- Winter\n
Year | Days\n2024 | thirty one\n\n## Layout\n\nleft\n\nright\n\na  b\n c\n\nTail\nline"""
WORD = docx(
    paragraph("Handbook", "Titel") + paragraph("Leave", "Heading1") + paragraph("Thirty days."),
    f"<w:sdt><w:sdtContent>{paragraph('Control.')}</w:sdtContent></w:sdt>" + paragraph("Tables", "b2"),
    "<w:p><w:ins><w:r><w:t>New.</w:t></w:r></w:ins><w:del><w:r><w:delText>Old.</w:delText></w:r></w:del></w:p>",
    f"<w:tbl><w:tr><w:tc>{paragraph('a')}{paragraph('b')}</w:tc><w:tc>{paragraph('c')}</w:tc></w:tr></w:tbl>",
)
WORD_TEXT = "# Handbook\n\n# Leave\n\nThirty days.\n\nControl.\n\n## Tables\n\nNew.\n\na b | c"
LINES = (24, 700, "A long"), (24, 672, "title"), (12, 640, "First line"), (12, 626, "second line."), (12, 600, "Next.")
SCALED = b"2 0 0 2 0 0 cm BT 9 0 0 9 36 300 Tm /F1 1 Tf (Part two) Tj /F1 .6 Tf 0 -2 Td (Its text here.) Tj ET"
PRINT = pdf(shown(*LINES), SCALED)
PRINT_TEXT = "# A long title\n\nFirst line\nsecond line.\n\nNext.\n\n## Part two\n\nIts text here."


def texts(*named, **limits):
    blobs = (Blob("", name, 0, data, None) for name, data in named)
    return list(document_texts(blobs, Rules(None, ("text",), 1 << 20, documents=True), Limits(**limits)))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (PAGE, PAGE_TEXT),
        (PRINT, PRINT_TEXT),
        ("<p>café".encode("utf-16"), "café"),
        ("<meta charset=shift_jis><p>日本".encode("shift_jis"), "日本"),
        ("<p>café “quoted”".encode("cp1252"), "café “quoted”"),
        (b"<title>Only\n title</title>text", "# Only title\n\ntext"),
        (b'<?xml version="1.0"?><html xmlns="x"><script src="x"/><p>seen</p></html>', "seen"),
        (b"<div>" * 300 + b"deep" + b"</div>" * 300 + b"<p>after", "deep\n\nafter"),
        (b'<!DOCTYPE html SYSTEM "file:///etc/hosts"><p>x<iframe src=/etc/hosts></iframe>y', "xy"),
        (b"", ""),
    ],
)
def test_texts_of_every_encoding_keep_headings_lists_tables_and_their_order(tmp_path, data, text):
    spread(tmp_path, {"a.xhtml": data, "b.docx": WORD})
    assert outcomes(read_all(files(tmp_path))) == [("a.xhtml", text), ("b.docx", WORD_TEXT)]


def test_content_decides_where_a_name_does_not_and_archives_are_read_alike(tmp_path):
    members = {"page": b"\n<!doctype HTML><p>a", "print": pdf(shown((9, 99, "b"))), "c.DOCX": pdf(shown((9, 99, "c")))}
    members |= {"d.htm": b"<p>d", "e.pdf": b"<html>e", "f.md": b"<html>f"}
    expected = [("page", "a"), ("print", "b"), ("c.DOCX", "c"), ("d.htm", "d"), ("e.pdf", "e"), ("f.md", "<html>f")]
    spread(tmp_path / "in", members | {"g.html.gz": gzip.compress(b"<p>g")})
    assert sorted(outcomes(read_all(files(tmp_path / "in")))) == sorted([*expected, ("g.html.gz", "g")])
    (tmp_path / "t.tgz").write_bytes(gzip.compress(tar(list(members.items()))))
    assert outcomes(read_all(files(tmp_path / "t.tgz"))) == [(f"t.tgz!{name}", text) for name, text in expected]


def test_after_an_interrupt_and_whatever_the_files_before_a_file_gets_its_own_text():
    named = [("a.html", b"<p>a"), ("b.html", b"<p>x" * 400_000), ("c.pdf", PRINT), ("d.docx", WORD)]
    there, back = (dict(outcomes(texts(*order, memory_mib=100))) for order in (named, named[::-1]))
    assert (there, there["b.html"]) == (back, "too_much_memory")
    assert texts(("a.html", b"<p>first"))[0].text == "first"

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            texts(("slow.html", b"<p>" + b"<b>slow</b> " * 1_000_000))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [texts((name, b"<html><p>own"))[0].text for name in "xy"] == ["own", "own"]


def test_a_long_text_is_cut_at_whitespace_and_a_file_beyond_128_mib_is_a_failure(tmp_path):
    (tmp_path / "a.html").write_bytes(b"<p>" + b"word " * 1000)
    with (tmp_path / "b.pdf").open("wb") as target:
        target.truncate((128 << 20) + 1)
    *records, failure = read_all(files(tmp_path, max_document_mib=1000 / 2**20))
    assert "".join(record.text for record in records) == ("word " * 1000).strip()
    assert [record.offset for record in records] == [0, 1000, 2000, 3000, 4000]
    says(f"{failure.reason} {failure.message}", "too_large", "128 MiB")


PASSWORD = b"/Encrypt<</Filter/Standard/V 1/R 2/O<%s>/U<%s>/P -4>>/ID[<00><00>]" % (b"11" * 32, b"22" * 32)


@pytest.mark.parametrize(
    ("name", "data", "reason", "message"),
    [
        ("a.html", b"<html><script>write()</script></html>", "no_text", "script"),
        ("a.html", b"<p>a\0b", "nul_bytes", "NUL"),
        ("a.html", b"<div>" * 100_000 + b"x", "undecodable", "depth"),
        ("a.docx", b"\xd0\xcf\x11\xe0" + bytes(600), "encrypted", "password"),
        ("a.docx", WORD[:300], "undecodable", "zip"),
        ("a.docx", docx("<w:sdt><w:sdtContent>" * 9000 + "</w:sdtContent></w:sdt>" * 9000), "undecodable", "recursion"),
        ("a.pdf", pdf(b""), "no_text", "scan"),
        ("a.pdf", pdf(shown(*LINES), trailer=PASSWORD), "encrypted", "password"),
        ("a.pdf", PRINT.replace(b"/Kids[5 0 R", b"/Kids[2 0 R"), "undecodable", "page"),
    ],
)
def test_a_file_without_a_text_has_a_reason(name, data, reason, message):
    failure, neighbour = texts((name, data), ("b.html", b"<p>b"))
    assert (failure.reason, failure.offset, neighbour.text) == (reason, 0, "b")
    says(failure.message, message)


ENTITIES = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
LAUGHS = docx(paragraph("&e9;"), prolog=f'<!DOCTYPE d [<!ENTITY e0 "ha">{ENTITIES}]>')
HOSTS = docx(paragraph("a&hosts;b"), prolog='<!DOCTYPE d [<!ENTITY hosts SYSTEM "file:///etc/hosts">]>')
FLATE = {"filters": b"/Filter/FlateDecode"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "reasons"),
    [
        ("paragraphs.docx", lambda: docx("<w:p/>" * 3_000_000), {"too_slow", "too_much_memory"}),
        ("spaces.docx", lambda: docx(**{"word/document.xml": b" " * (1 << 28)}), {"too_slow", "undecodable"}),
        ("entities.docx", lambda: LAUGHS, {"too_slow", "undecodable"}),
        ("lists.html", lambda: b"<ul>" * 2000 + b"<li>x" * 200_000, {"too_much_memory", "too_slow"}),
        ("stream.pdf", lambda: pdf(zlib.compress(bytes(1 << 29)), **FLATE), {"undecodable"}),
        ("text.pdf", lambda: pdf(zlib.compress(b"BT /F1 9 Tf " + b"(a) Tj " * (1 << 22)), **FLATE), {"undecodable"}),
        ("loop.pdf", lambda: pdf(b"/X Do /X Do", form=b"/X Do /X Do"), {"too_slow", "undecodable"}),
    ],
)
def test_bombs_are_bounded_and_counted(name, make, reasons):
    before, bomb, after = texts(("b.pdf", PRINT), (name, make()), ("c.docx", HOSTS), memory_mib=200, cpu_seconds=2)
    assert bomb.reason in reasons
    assert (before.text, after.text) == (PRINT_TEXT, "ab")


def test_prepare_and_adapt_read_every_file_of_a_folder_of_six_kinds(tmp_path, make_config, prepare_units):
    headings, out = [], tmp_path / "adapted"
    for number in range(60):
        heading, kind = f"Rule {number} of the house", KINDS[number % 6]
        spread(tmp_path / "in", {f"{number % 7}/{number}.{kind}": document(kind, heading, sentence(number, 300))})
        headings += [heading] * (number % 6 < 4)
    spread(tmp_path / "in", {"scan.pdf": pdf(b""), "app.html": b"<script>a</script>"})
    manifest, ledger, folder = prepare_units(make_config(tmp_path / "in"))
    kept = Counter(entry.source.rpartition(".")[2] for entry in ledger if entry.row is not None)
    assert (kept, manifest.failed, manifest.skipped) == (dict.fromkeys(KINDS, 10), {"no_text": 2}, {})
    load_tokenizer(str(folder / "tokenizer")).save_pretrained(out / "tokenizer")
    config = AdaptConfig(encoder=str(out / "tokenizer"), corpus=[str(tmp_path / "in")]).prepare_config(out)
    manifest, _ = prepare_here(config, out, manifest.tokenizer)
    assert (manifest.totals["kept"], manifest.failed) == (60, {"no_text": 2})
    passages = make_passages(all_documents(config.corpus, out), load_tokenizer(str(out / "tokenizer")))
    assert sorted(passages.queries) == sorted(headings)


def test_without_the_extra_files_are_counted_or_refused(tmp_path, make_config, output, monkeypatch):
    members = {"a.md": b"a", "b.html": b"<p>b", "c.pdf": PRINT, "d.docx": WORD}
    folder, archive = spread(tmp_path / "in", members), tmp_path / "t.tar"
    archive.write_bytes(tar(list(members.items())))
    (read,), (packed,) = plan_units(files(folder), 1)[0], plan_units(files(archive), 1)[0]
    config, remedy, skipped = make_config(folder), "pip install lxml mammoth pypdfium2", Skipped()
    later, packed_later = plan_of(config, [read]), plan_of(config, [packed])
    monkeypatch.setitem(errors._PACKAGES, "documents", ("lxml", "absent_package"))
    (unread,), problems = plan_units(files(folder), 1, skipped)
    assert (problems, outcomes(UnitReader(unread, files(folder)))) == ([], [("a.md", "a")])
    says(describe_skipped(skipped.kinds())[0], "1 .html (such as 'b.html')", ".docx", ".pdf", remedy)
    for name in ("b.html", "c.pdf", "d.docx"):
        says(*plan_units(files(folder / name), 1)[1], name, "pip install absent_package")
    assert outcomes(read_all(files(folder / "b.html", format="text_file"))) == [("b.html", "<p>b")]
    (bare,), _ = plan_units(files(archive), 1)
    records = list(UnitReader(bare, files(archive)))
    assert [outcome for _, outcome in outcomes(records)] == ["a", *["unknown_format"] * 3]
    says(records[1].message, remedy)
    assert hash_unit(bare) != hash_unit(packed)  # or an archive that is half read could go on with more documents
    with pytest.raises(OSError, match="absent_package"):  # a host without it, in a preparation with it
        list(UnitReader(read, files(folder)))
    for now, before in ((later, plan_of(config, [unread], skipped.kinds())), (packed_later, plan_of(config, [bare]))):
        (output[0] / "plan.json").write_text(before.model_dump_json())
        place = Output("out", output[0], config.duplicates, config.session)
        says(*place.problems(now), "other inputs", "extra `documents`", "new files alone", "`data`")
