"""The documentation as a site, without building it: navigation, links, anchors, Markdown that needs no plugin."""

import json
import os
import re
import runpy
import unicodedata
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NAMES = "README.md AGENTS.md CONTRIBUTING.md CHANGELOG.md SECURITY.md benchmarks/README.md llms.txt"
OTHERS = [ROOT / name for name in NAMES.split()]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
QUESTIONS = ["config", "long", "memory", "better", "dropped", "resume", "Python", "Slurm", "offline", "licence"]


def prose(path):
    lines = FENCE.sub("", path.read_text()).splitlines()
    return [line for line in lines if not line.startswith("    ") or line.lstrip()[:2] == "- "]


def headings(path):
    return [line.lstrip("#").strip() for line in prose(path) if re.match(r"#+ ", line)]


def anchors(path):
    """Anchors that a forge and MkDocs both give to headings that occur once."""
    texts = [re.sub(r"\[(.+?)\]\(.+?\)", r"\1", heading).replace("`", "") for heading in headings(path)]
    forge = [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts]
    plain = [unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode() for text in texts]
    site = [re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()) for text in plain]
    return {anchor for anchor, other in zip(forge, site, strict=True) if anchor == other and site.count(anchor) == 1}


def pages_of(entries):
    """Page to the titles above it, from a navigation of MkDocs."""
    pages = {}
    for title, value in (item for entry in entries for item in entry.items()):
        below = {value: ()} if isinstance(value, str) else pages_of(value)
        pages |= {page: (title, *titles) for page, titles in below.items()}
    return pages


NAVIGATION = pages_of(SITE["nav"])


@pytest.mark.parametrize("path", [*PAGES, *OTHERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files_and_headings(path):
    dead = []
    for link in LINK.findall("\n".join(prose(path))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = Path(os.path.normpath(path.parent / name)) if name else path
        outside = path.is_relative_to(DOCS) and not target.is_relative_to(DOCS)
        if outside or not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_navigation_has_every_page_of_the_site_once():
    off = re.compile("decisions/|evidence/log.md")
    assert SITE["exclude_docs"].split() == ["/decisions/", "/evidence/log.md", "/site.py"]
    pages = {name for path in PAGES if not off.match(name := str(path.relative_to(DOCS)))}
    assert pages == set(NAVIGATION)
    assert (len(pages) <= 40, "plugins" in SITE) == (True, False)
    assert sum(len(path.read_text().split()) for path in [OTHERS[0], *map(DOCS.joinpath, pages)]) <= 30_000


def test_readme_and_home_begin_alike_and_soon_with_commands():
    readme, home = ((folder / name).read_text() for folder, name in ((ROOT, "README.md"), (DOCS, "index.md")))
    sentence, commands, *_ = readme.split("\n\n")
    assert (len(sentence.split()) <= 21, home.split("\n\n")[:2]) == (True, [sentence, commands])
    assert FENCE.findall(readme) == FENCE.findall(home)
    assert re.findall(r"pip install|declutr-ray", readme) == [], "an index could resolve it to somebody else's package"


def test_links_to_pages_off_the_site_become_their_words():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guides/x.md"))
    config = SimpleNamespace(exclude_docs=SimpleNamespace(match_file=lambda name: name == "evidence/log.md"))
    hook = runpy.run_path(str(DOCS / "site.py"))["on_page_markdown"]
    text = hook("[a\nb](../evidence/log.md#c) [d](../evidence/gpu.md#e)", page, config, files=None)
    assert text == "a\nb [d](../evidence/gpu.md#e)"


def test_decisions_are_listed_by_number_and_title():
    rows = re.findall(r"^\| (\d+) \| \[(.+)\]\((.+)\) \|$", (DOCS / "decisions/index.md").read_text(), re.MULTILINE)
    titles = {path.name: headings(path)[0] for path in (DOCS / "decisions").glob("0*.md")}
    assert {name: f"{number}. {title}" for number, title, name in rows} == titles


def test_ten_questions_have_an_answer_that_the_navigation_leads_to():
    rows = re.findall(r"^\| (.+\?) \| (.+): \[(.+)\]\((.+)#(.+)\) \|$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert [any(word in question for question, *_ in rows) for word in QUESTIONS] == [True] * len(QUESTIONS)
    assert len(rows) == len(QUESTIONS)
    for question, way, shown, page, anchor in rows:
        section, title = NAVIGATION[page]
        assert way.split(", ")[0] == section, question
        assert way.split(", ")[1].lower().rstrip("?") in title.lower(), question
        assert shown.lower() in [heading.lower() for heading in headings(DOCS / page)], question
        assert anchor in anchors(DOCS / page), question


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_page_is_plain_markdown(path):
    """What needs a plugin or an extension, and what MkDocs reads otherwise than a forge."""
    text = path.read_text()
    assert re.findall(r"^(?:!!!|\?\?\?|:::|```mermaid|```\w+ |\{[%{])", text, re.MULTILINE) == []
    lines = FENCE.sub("", text).splitlines()
    joined = [line for line in lines if re.search(r"\S.*\| -{3}", line) and not line.lstrip().startswith("| -")]
    assert joined + [line for line in lines if "> >" in line] == [], "rows of a table or a quotation in one line"
    item = re.compile(r"(?:[-*]|\d+\.) ")
    starts = [pair for pair in pairwise(lines) if item.match(pair[1]) or pair[1].startswith("| ")]
    swallowed = [line for before, line in starts if re.match(r"[^\s|#]", before) and not item.match(before)]
    assert swallowed == [], "a list or table needs an empty line before it"
    assert [line for line in lines if re.match(r" {1,3}[-*] ", line)] == [], "indent a list in a list by 4 spaces"


def test_picture_of_the_readme_shows_the_file_of_results():
    """A point of recall is 32 pixels, and the first is at 170."""
    file = ROOT / "benchmarks/results/adapt-queries_all-minilm-l6-v2_epyc-2cores_2026-11-30.json"
    runs = [run for run in json.loads(file.read_text())["runs"] if run["chosen"] and run["sentences"]["low"]]
    picture = (DOCS / "adapted.svg").read_text()
    assert re.findall(r'y="\d+">(\S+, seed \d)<', picture) == [f"{run['source']}, seed {run['seed']}" for run in runs]
    lines = re.findall(r'x1="([\d.]+)" x2="([\d.]+)" y1="\d+" y2="\d+" stroke="\S+" stroke-width="3"', picture)
    middles = re.findall(r'<circle cx="([\d.]+)"', picture)
    pixels = [(low, middle, high) for (low, high), middle in zip(lines, middles, strict=True)]
    values = [[run["sentences"][name] for name in ("low", "value", "high")] for run in runs]
    assert pixels == [tuple(f"{170 + 32 * value:.1f}" for value in row) for row in values]
