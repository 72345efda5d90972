"""Shards of images and sounds, prepared without Ray."""

from mediafiles import spread
from preparing import prepare_here

from declutr.pipeline.config import PipelineConfig


def prepare_media(folder, content, files):
    """A folder of shards of these files; returns it and its manifest."""
    corpus = {"kind": "files", "paths": [str(spread(folder / "in", files))]}
    values = {"output": "out", "corpus": corpus, "content": content, "duplicates": {"exact": False}}
    (folder / "out").mkdir()
    config = PipelineConfig.model_validate(values | {"validation_fraction": 0.2})
    return folder / "out", prepare_here(config, folder / "out", None)[0]
