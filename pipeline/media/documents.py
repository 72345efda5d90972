"""Texts of html, docx and pdf files, for the process of decoding.py alone. Headings become lines as in Markdown.

lxml parses HTML, mammoth makes HTML of docx, PDFium gives letters with sizes and places. No script runs.
"""

import math
from collections import Counter
from collections.abc import Iterator
from ctypes import c_double
from io import BytesIO
from itertools import pairwise
from lzma import LZMAError
from typing import Any
from xml.parsers.expat import ExpatError
from zipfile import BadZipFile

import mammoth
from lxml import etree
from lxml.html import defs
from pypdfium2 import PdfDocument, raw

from declutr.pipeline.media.decoding import UndecodableError, library_message
from declutr.pipeline.media.images import PILLOW_ERRORS

_ERRORS = (*PILLOW_ERRORS, BadZipFile, ExpatError, LZMAError)  # lxml, mammoth and PDFium raise the same, and these
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_INLINE = defs.special_inline_tags | defs.phrase_tags | defs.font_style_tags
_INLINE |= {"bdi", "data", "input", "label", "mark", "rp", "rt", "ruby", "time", "wbr"}
_DROPPED = ("head", "script", "style", "template", "noscript", "nav", "footer", "iframe", "svg", "button", "select")
_STYLES = "p[style-name='Title'] => h1:fresh\np[style-name='Subtitle'] => h2:fresh"
_RATIO = 1.15  # least size of a heading's letters to usual ones, and largest distance of lines to the usual one


def extracted(data: bytes, kind: str) -> str:
    """The text of an html, docx or pdf file, empty for an empty file; raises UndecodableError if there is none."""
    try:
        text = {"html": html_text, "docx": docx_text, "pdf": pdf_text}[kind](data) if data.strip() else ""
    except UndecodableError:
        raise
    except _ERRORS as error:
        protected = getattr(error, "err_code", None) in (raw.FPDF_ERR_PASSWORD, raw.FPDF_ERR_SECURITY)
        raise UndecodableError("encrypted" if protected else "undecodable", library_message(error)) from error
    if data.strip() and not text.strip():
        remedy = "a script makes it: save the page as it is shown" if kind == "html" else "a scan needs OCR first"
        raise UndecodableError("no_text", f"it has no text, most likely because {remedy}")
    return text


def html_text(data: bytes) -> str:
    """The text of a page without scripts, navigation and footers."""
    if b"\0" in data:
        raise UndecodableError("nul_bytes", "NUL bytes, which no text has")
    encoding: str | None = "utf-8"
    try:
        data.decode()
    except UnicodeDecodeError:
        encoding = None if b"charset" in data[:1024].lower() else "windows-1252"  # None: as declared
    # huge_tree: else the tree ends at an element inside 255 others, and the rest of the text is lost
    parser = etree.HTMLParser(encoding=encoding, remove_comments=True, remove_pis=True, huge_tree=True)
    try:
        root = etree.fromstring(data, parser)
    except etree.XMLSyntaxError as error:  # HTML has no syntax errors for lxml: memory is short
        raise MemoryError from error
    if fatal := parser.error_log.filter_from_fatals():
        raise UndecodableError("undecodable", fatal[0].message)
    if root is None:
        return ""
    title = " ".join(root.findtext("head/title", "").split())
    for element in root.iterfind(".//*[@role='navigation']"):
        element.tag = "nav"
    etree.strip_elements(root, *_DROPPED, with_tail=False)
    text = _blocks(root)
    return f"# {title}\n\n{text}" if title and text and "\n# " not in f"\n{text}" else text


def _blocks(root: Any) -> str:
    """The blocks of an element with blank lines between them; items of a list and rows of a table are lines."""
    blocks, pieces, prefix = list[tuple[str, str]](), list[str](), ""  # kind ("-": item, "|": row, "": other) and text
    walk = etree.iterwalk(root, events=("start", "end"))
    for event, element in walk:
        tag, is_start = element.tag, event == "start"
        if tag not in _INLINE:
            lines = filter(None, (" ".join(line.split()) for line in "".join(pieces).split("\n")))
            if text := (" " if prefix.startswith("#") else "\n").join(lines):
                blocks.append(("-" if prefix.endswith("- ") else "", prefix + text))
                prefix = ""
            pieces.clear()
            prefix = prefix if is_start else ""
        if is_start and tag == "pre":
            blocks.append(("", "".join(element.itertext()).strip("\n")))
            walk.skip_subtree()
        # a row with a table or heading inside lays out a page
        elif is_start and tag == "tr" and next(element.iterdescendants("table", *_HEADINGS), None) is None:
            cells = ((_blocks(cell) if len(cell) else cell.text or "") + (cell.tail or "") for cell in element)
            blocks.append(("|", " | ".join(" ".join(cell.split()) for cell in cells)))
            walk.skip_subtree()
        else:
            if is_start and tag == "li":
                prefix = "  " * (len(list(element.iterancestors("ul", "ol"))) - 1) + "- "
            prefix = _HEADINGS.get(tag, prefix) if is_start else prefix
            pieces.append(((element.text if is_start else element.tail) or "").replace("\n", " "))
            pieces += ["\n"] * (is_start and tag == "br")
    blocks = [("", ""), *(block for block in blocks if block[1].strip(" |\n"))]
    # Neighbouring items, and neighbouring rows, have no blank line between them.
    pieces = [("\n" if kind and kind == before else "\n\n") + text for (before, _), (kind, text) in pairwise(blocks)]
    return "".join(pieces).strip("\n")


def docx_text(data: bytes) -> str:
    """The text of a document of Word with its footnotes, without headers, comments and deleted text."""
    if data.startswith(b"\xd0\xcf\x11\xe0"):
        raise UndecodableError("encrypted", "it has a password, or is a .doc; save it as .docx without a password")
    options = {"style_map": _STYLES, "include_embedded_style_map": False, "convert_image": lambda _: []}
    return html_text(mammoth.convert_to_html(BytesIO(data), **options).value.encode())


def pdf_text(data: bytes) -> str:
    """The text of a PDF, page by page; lines in larger letters are headings."""
    lines = [line for page in PdfDocument(data) for line in _lines(page)]
    sizes = Counter(size for size, _, text in lines for _ in text)
    drops = Counter(drop for _, drop, _ in lines if drop > 0)
    usual, usual_drop = (max(counts, key=counts.__getitem__, default=0.0) for counts in (sizes, drops))
    large = sorted((size for size in sizes if size >= _RATIO * usual), reverse=True)
    marks = {size: "#" * min(level, 6) + " " for level, size in enumerate(large, 1)}
    pieces, before = [], ""
    for size, drop, text in lines:
        mark = marks.get(size, "") if any(map(str.isalpha, text)) else ""
        continues = mark == before and 0 <= drop <= _RATIO * usual_drop
        pieces.append((" " if mark else "\n") + text if continues else f"\n\n{mark}{text}")
        before = mark
    return "".join(pieces).strip("\n")


def _lines(page: Any) -> Iterator[tuple[float, float, str]]:
    """Size of each line's letters in points, distance from the line above in this size (-1 for the first), and text."""
    text_page, matrix, x, y = page.get_textpage(), raw.FS_MATRIX(), c_double(), c_double()
    units = [raw.FPDFText_GetUnicode(text_page, index) for index in range(text_page.count_chars())]
    start, above = 0, -math.inf
    for line in "".join(map(chr, units)).split("\r\n"):
        if words := line.split():
            middle = start + line.index(words[len(words) // 2])  # no space, which may be made up and without a size
            raw.FPDFText_GetMatrix(text_page, middle, matrix)
            raw.FPDFText_GetCharOrigin(text_page, middle, x, y)
            size = raw.FPDFText_GetFontSize(text_page, middle) * math.hypot(matrix.c, matrix.d) or 1.0
            # 0: no letter is known; 2: hyphen of a word that is cut; letters beyond U+FFFF may come as two surrogates
            text = " ".join(words).translate({0: None, 2: None}).encode("utf-16", "surrogatepass")
            yield round(2 * size) / 2, round(max(-1.0, (above - y.value) / size), 1), text.decode("utf-16", "replace")
            above = y.value
        start += len(line) + 2
