"""Small docx and PDF files, written part by part; a document of each kind."""

import io
import zipfile
from textwrap import wrap

_OFFICE = "http://schemas.openxmlformats.org"
_W = f'xmlns:w="{_OFFICE}/wordprocessingml/2006/main"'
_STYLE = '<w:style w:type="paragraph" w:styleId="%s"><w:name w:val="%s"/></w:style>'
PARTS = {
    "_rels/.rels": f'<Relationships xmlns="{_OFFICE}/package/2006/relationships"><Relationship Id="r1" '
    f'Type="{_OFFICE}/officeDocument/2006/relationships/officeDocument" Target="word/document.xml"/></Relationships>',
    "word/styles.xml": f"<w:styles {_W}>{_STYLE % ('b2', 'heading 2')}{_STYLE % ('Titel', 'Title')}</w:styles>",
}


def paragraph(text, style=None):
    properties = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{properties}<w:r><w:t>{text}</w:t></w:r></w:p>"


def docx(*blocks, prolog="", **parts):
    body, target = f"{prolog}<w:document {_W}><w:body>{''.join(blocks)}</w:body></w:document>", io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (PARTS | {"word/document.xml": body} | parts).items():
            archive.writestr(name, content)
    return target.getvalue()


def shown(*lines):
    """A page as PDF's operators: (size, height, text) of each line."""
    return b"BT %s ET" % b" ".join(b"/F1 %g Tf 1 0 0 1 72 %g Tm (%s) Tj" % (s, y, t.encode()) for s, y, t in lines)


def pdf(*pages, filters=b"", trailer=b"", form=b""):
    """A PDF of pages, each given as operators; they, and the form, may show the form as /X."""
    bodies, kids = [b"<</Type/Catalog/Pages 2 0 R>>", b"", b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"], b""
    resources = b"/Resources<</Font<</F1 3 0 R>>/XObject<</X %d 0 R>>>>" % (4 + 2 * len(pages))
    for page in pages:
        bodies.append(b"<</Length %d%s>>stream\n%s\nendstream" % (len(page), filters, page))
        bodies.append(b"<</Type/Page/Parent 2 0 R/Contents %d 0 R%s>>" % (len(bodies), resources))
        kids += b"%d 0 R " % len(bodies)
    bodies[1] = b"<</Type/Pages/Kids[%s]/Count %d/MediaBox[0 0 612 792]>>" % (kids, len(pages))
    bodies.append(b"<</Subtype/Form/BBox[0 0 9 9]%s/Length %d>>stream\n%s\nendstream" % (resources, len(form), form))
    data, table = b"%PDF-1.7\n", b"0000000000 65535 f \n"
    for number, body in enumerate(bodies, 1):
        table += b"%010d 00000 n \n" % len(data)
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    end = b"trailer<</Size %d/Root 1 0 R%s>>\nstartxref\n%d\n%%%%EOF" % (len(bodies) + 1, trailer, len(data))
    return b"%sxref\n0 %d\n%s%s" % (data, len(bodies) + 1, table, end)


KINDS = ("md", "html", "docx", "pdf", "txt", "csv")


def document(kind, title, body):
    """A document of one of the kinds; the last two have no title."""
    if kind == "docx":
        return docx(paragraph(title, "Heading1"), paragraph(body))
    if kind == "pdf":
        return pdf(shown((20, 750, title), *((10, 700 - 12 * row, line) for row, line in enumerate(wrap(body, 90)))))
    page = f"<!doctype html><nav>Home</nav><h1>{title}</h1><p>{body}"
    return {"md": f"# {title}\n\n{body}", "html": page, "txt": body, "csv": f'text\n"{body}"\n'}[kind].encode()
