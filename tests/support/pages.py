"""A page as a parser reads it, and the rules that every page keeps."""

import re
from collections import Counter
from html.parser import HTMLParser

from declutr.common.console.terminal import visible

_VOID = {"meta", "br", "img"}
_ELEMENTS = re.compile(
    "html|head|meta|title|style|body|header|nav|main|section|footer|article|h1|h2|h3|p|a|ul|li|dl|div|dt|dd|span|i|small|"
    "strong|bdi|br|code|pre|blockquote|time|details|summary|figure|figcaption|img|table|caption|thead|tbody|tr|th|td|"
    "meter|svg|g|path|use|defs|clippath|rect|text"
)


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text outside the style sheet."""

    def __init__(self, source):
        super().__init__()
        self.elements, self.words, self._open = [], [], []
        self.feed(source)
        assert not self._open, "an element is not closed"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open[-1:]:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def policy(self):
        (policy,) = [attrs["content"] for tag, attrs in self.elements if "http-equiv" in attrs]
        return dict(part.strip().split(" ", 1) for part in policy.split(";"))


def checked(source):
    """The page, which has no script, style of its own, request, steering character, or two elements of one id."""
    page = Page(source)
    policy, pictures = page.policy(), [attrs["src"] for tag, attrs in page.elements if tag == "img"]
    assert policy.pop("img-src", "data:") == "data:"
    assert re.fullmatch("'sha256-[A-Za-z0-9+/=]{44}'", policy.pop("style-src"))
    assert policy == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}
    assert all(picture.startswith("data:image/png;base64,") for picture in pictures)
    ids = Counter(attrs["id"] for _, attrs in page.elements if "id" in attrs)
    assert not [name for name, number in ids.items() if number > 1]
    for tag, attrs in page.elements:
        assert _ELEMENTS.fullmatch(tag)
        assert not [name for name in attrs if name == "style" or name.startswith("on")]
        for name in ("href", "xlink:href"):
            assert name not in attrs or attrs[name][1:] in ids
        assert tag != "th" or attrs["scope"]
        assert tag != "svg" or attrs["aria-hidden"] == "true"  # the element around it has its words
        assert attrs.get("role") != "img" or attrs["aria-label"]
    text = page.text
    assert visible(text) == text
    return page
