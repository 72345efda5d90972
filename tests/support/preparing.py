"""Settings of small preparations on Ray, and checksums of what they wrote."""

from declutr.common.storage import hash_file
from declutr.pipeline.config import PipelineConfig

DOCUMENTS = {
    "tokenizer": {"kind": "train", "vocab_size": 400, "sample_mib": 0.1},
    "geometry": {"num_anchors": 1, "max_tokens": 32},
    "unit_mib": 0.1,
    "record_batch_rows": 20,
}


def values_of(corpus, output, **changes):
    """Settings as in a file: the corpus is a folder, a fifth is held out."""
    values = {
        "output": str(output),
        "corpus": {"kind": "files", "paths": [str(corpus)]},
        "validation_fraction": 0.2,
        "record_batch_rows": 16,
    }
    return values | changes


def config_of(corpus, output, **changes):
    """The settings of long documents."""
    return PipelineConfig.model_validate(values_of(corpus, output, **DOCUMENTS) | changes)


def checksums(folder):
    """Checksums of all files below a folder, except for the log of how long it took."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "progress.jsonl"]
    return {str(path.relative_to(folder)): hash_file(path) for path in files}
