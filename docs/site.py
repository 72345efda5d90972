"""Replaces links to pages that are not on the site by their words, for MkDocs (`hooks` in mkdocs.yml)."""

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The text of a page without links to files that `exclude_docs` names; on a forge they work."""

    def words_or_link(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link[2]))
        return link[1] if config.exclude_docs.match_file(target) else link[0]

    return re.sub(r"\[([^]]+)\]\(([\w./-]+\.md)[^)\s]*\)", words_or_link, markdown)
