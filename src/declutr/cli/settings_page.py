"""The page docs/reference/settings.md, generated from the configuration models: `make settings`."""

from declutr.common.config_docs import settings_tables
from declutr.pipeline.config import PipelineConfig
from declutr.trainer.setup.config import TrainConfig

_HEAD = """# Settings

Generated from the docstrings of the configuration models by `make settings`; do not edit.

A config file has a `prepare` section, a `train` section, or both. On the command line a setting is written without its
section: `declutr train CONFIG optim.lr=3e-5`. `--print-config` prints the settings of one command with their values.
"""


def page() -> str:
    """Return the page as Markdown."""
    sections = (("prepare", PipelineConfig), ("train", TrainConfig))
    lines = [line for name, model in sections for line in settings_tables(model, name)]
    return "\n".join([_HEAD, *lines]).rstrip("\n") + "\n"


if __name__ == "__main__":
    print(page(), end="")
