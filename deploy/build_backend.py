"""Build backend (PEP 517, PEP 660): editable installs by setuptools, no wheels and no source distributions.

A wheel would install top-level packages named `common`, `trainer`, `pipeline` and so on, which clash with packages of
other projects. See docs/decisions/0020-folders.md.
"""

from typing import NoReturn

from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    prepare_metadata_for_build_editable,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "prepare_metadata_for_build_editable",
]

_REFUSAL = (
    "declutr-ray runs from its checkout: a wheel would install top-level packages named common, trainer, pipeline, "
    "evaluation and others, which clash with packages of other projects. Clone the repository and run `make setup`, or "
    "`pip install -e .` there (docs/decisions/0020-folders.md)"
)


def build_wheel(*_arguments: object, **_settings: object) -> NoReturn:
    """Refuse to build a wheel."""
    raise SystemExit(_REFUSAL)


def build_sdist(*_arguments: object, **_settings: object) -> NoReturn:
    """Refuse to build a source distribution: pip would make a wheel of it."""
    raise SystemExit(_REFUSAL)
