"""Shards of documents and of short texts, prepared without Ray."""

import json

from preparing import prepare_here

from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.tokenizer.tokenization import describe_tokenizer, train_tokenizer


def prepare_rows(folder, content, rows, texts=None, **settings):
    """A folder of shards of these records, made by `prepare`'s own functions; returns it and its manifest.

    The tokenizer is trained on `texts`, if given, else on the records.
    """
    folder.mkdir()
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = {"kind": "files", "paths": [str(folder / "in.jsonl")]}
    values = {"output": str(folder / "out"), "corpus": corpus, "tokenizer": {"kind": "train", "vocab_size": 400}}
    values |= {"content": content, "validation_fraction": 0.2, "duplicates": {"exact": False}}
    own = (value for row in rows for value in row.values() if isinstance(value, str))
    tokenizer = train_tokenizer(own if texts is None else iter(texts), 400)
    tokenizer.save_pretrained(str(folder / "out" / "tokenizer"))
    config = PipelineConfig.model_validate(values | settings)
    return folder / "out", prepare_here(config, folder / "out", describe_tokenizer(tokenizer, "train"))[0]
