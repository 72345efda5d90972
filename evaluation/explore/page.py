"""The page: one HTML file with inline style and script, and the policy that lets no other code run."""

import base64
import hashlib
from importlib.resources import files


def page() -> tuple[str, str]:
    """Return the whole document and its Content-Security-Policy.

    The policy names the style and the script by their hashes. The script may contact only the page's own server.
    """
    report, here = files("evaluation.report"), files("evaluation.explore")
    style = "".join(place.read_text(encoding="utf-8") for place in (report / "style.css", here / "page.css"))
    script = "".join((here / name).read_text(encoding="utf-8") for name in ("map.js", "page.js"))
    html = (here / "page.html").read_text(encoding="utf-8")
    html = html.replace("/* style */", style).replace("/* script */", script)
    policy = (
        f"default-src 'none'; style-src {_named(style)}; script-src {_named(script)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def _named(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
