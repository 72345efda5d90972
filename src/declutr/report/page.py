"""A page: one HTML file without scripts, other files or network requests.

Texts of a corpus are hostile. They hold script tags, control characters, and overrides of the writing direction, which
reorder the page around them. jinja2 escapes every value of a template that is not `Markup`, `shown` replaces such
characters by their code points, and the page's policy forbids all scripts, and every style but ours.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from declutr.common.console.terminal import visible
from declutr.common.storage import write_text

if TYPE_CHECKING:
    from jinja2 import Environment

    from declutr.evaluation.senteval.harness import Evaluated

Role = Literal["kept", "short", "dropped", "failed"]  # kind of rows that a bar counts; decides its colour
STYLE = (files(__package__) / "style.css").read_text(encoding="utf-8")
"""The only style that the policy of a page permits."""
REPORT = "report"  # default folder of a page, inside the folder that it describes


@dataclass(frozen=True)
class Label:
    """Name of a table's row, with a bar and a note."""

    text: str  # name, in the writing direction of its own
    bar: float | None = None  # length of the bar, 0 to 1; None for no bar
    role: Role = "kept"  # colour of the bar
    note: str = ""  # small print below


def write_page(path: Path, template: str, title: str, pictures: bool = False, **values: Any) -> None:
    """Writes a page from a template of the folder `templates`. Equal values give equal bytes.

    The policy permits images that are part of the page if there are `pictures`.
    """
    from markupsafe import Markup

    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()  # the policy permits this style alone
    images = "img-src data:; " if pictures else ""
    policy = f"default-src 'none'; {images}style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    page = _environment().get_template(template)
    write_text(path, page.render(title=title, policy=policy, style=Markup(STYLE), **values))


def shown(value: Any) -> Any:
    """A value as a page has it: integers with thousands separators, None as a dash, hostile characters visible."""
    if value is None:
        return "–"
    if hasattr(value, "__html__"):  # Markup of ours
        return value
    return f"{value:,}" if isinstance(value, int) else visible(str(value))


def share(part: float, whole: float) -> str:
    """Percentage with one decimal; a dash if the whole is 0."""
    return f"{part / whole:.1%}" if whole else "–"


def in_mib(num_bytes: float) -> str:
    """Bytes in MiB, or GiB from 10 GiB on."""
    mib = num_bytes / 2**20
    return f"{mib / 1024:,.1f} GiB" if mib >= 10_240 else f"{mib:,.1f} MiB" if mib >= 10 else f"{mib:,.2f} MiB"


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,  # jinja2 does not escape unless it is told to
        finalize=shown,
        undefined=StrictUndefined,  # a name that a template mistypes is an error and not an empty text
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],  # templates append rows to tables
    )
    environment.globals.update(share=share, in_mib=in_mib, Label=Label)
    environment.globals["page"] = environment.get_template("macros.html").module
    return environment


def write_scores_page(evaluated: Sequence["Evaluated"], path: Path) -> None:
    """Writes the page of encoders' scores beside published ones."""
    from declutr.evaluation.tables import compare, literature, remarks
    from declutr.evaluation.tables import shown as cell

    published = literature()
    blocks, lines = compare(evaluated, published), remarks(evaluated, published)
    write_page(path, "scores.html", "SentEval: sentence encoders compared", blocks=blocks, remarks=lines, cell=cell)
