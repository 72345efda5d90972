"""Programs that preparation is compared with, each in separate processes that start together.

A process loads its libraries, and for the limit its texts, before it waits for the others. So start-up is not measured.
"""

import glob
import gzip
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer

from declutr.pipeline.filters.document_filter import normalise
from declutr.pipeline.tokenizer.batch_tokenizer import BatchTokenizer, EngineName
from declutr.pipeline.tokenizer.bytelevel import ByteLevelBPE, parse

_start: list[Barrier] = []  # in a process of `run`: the barrier that all of them pass together
_BATCH = 256
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def texts_of(paths: list[str]) -> Iterator[str]:
    """Normalised texts of compressed JSONL files, in order."""
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            yield from (normalise(json.loads(line)["text"]) for line in lines)


def expand_paths(pattern: str) -> list[str]:
    """Absolute paths of a glob, sorted."""
    return sorted(str(Path(path).resolve()) for path in glob.glob(str(Path(pattern).expanduser())))  # noqa: PTH207


def datasets(settings: dict[str, Any]) -> dict[str, Any]:
    """`load_dataset`, `map` and `filter` in typical use, tokenizing the same texts to the same ids."""
    import datasets as library
    from transformers import AutoTokenizer

    library.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    prefix, workers = settings["prefix"], settings["workers"]
    options = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False}
    options["verbose"] = False  # no warnings about texts longer than a model's positions

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        texts = [prefix + text if (text := " ".join(raw.split())) else "" for raw in batch["text"]]
        ids = tokenizer(texts, **options)["input_ids"]
        return {"input_ids": ids, "num_tokens": [len(row) for row in ids]}

    _start[0].wait()
    begun = time.perf_counter()
    loaded = library.load_dataset("json", data_files=settings["paths"], split="train")
    rows = loaded.map(tokenize, batched=True, num_proc=workers, remove_columns=loaded.column_names)
    least = settings["min_tokens"]
    kept = rows.filter(lambda count: count >= least, input_columns="num_tokens", num_proc=workers)
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "documents": len(kept), "tokens": sum(kept["num_tokens"])}


def limit(settings: dict[str, Any]) -> dict[str, Any]:
    """Run the tokenizing engine alone on this process's share of the texts, which are in memory.

    The engine is ours, which chooses its pattern by the text. With `stock` it is tiktoken with GPT-2's pattern in
    typical use.
    """
    share, workers = settings["share"], settings["workers"]
    texts = [text for index, text in enumerate(texts_of(settings["paths"])) if index % workers == share]
    engine: EngineName = settings["engine"]
    encoder = BatchTokenizer.load(Path(settings["tokenizer"]), engine)
    encode: Callable[[list[str]], Any] = encoder.encode
    if settings["stock"]:
        plain = ByteLevelBPE(parse(Tokenizer.from_file(str(Path(settings["tokenizer"]) / "tokenizer.json"))))
        encode = plain.engine(GPT2_PATTERN).encode_ordinary_batch
        encode = partial(encode, num_threads=1)
    encode(texts[:_BATCH])
    _start[0].wait()
    begun = time.perf_counter()
    for start in range(0, len(texts), _BATCH):
        encode(texts[start : start + _BATCH])
    return {"seconds": time.perf_counter() - begun}


def run(
    work: Callable[[dict[str, Any]], dict[str, Any]], settings: list[dict[str, Any]], cache: Path
) -> list[dict[str, Any]]:
    """Call `work` with each of the settings in a fresh process, all started at the same time; return their figures."""
    # Empty caches in every round, and only the threads of the counted processes.
    environment = {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    context = multiprocessing.get_context("spawn")
    with (
        patch.dict(os.environ, environment),
        ProcessPoolExecutor(len(settings), context, _join, (context.Barrier(len(settings)),)) as pool,
    ):
        return list(pool.map(partial(_call, work), settings))


def _join(barrier: Barrier) -> None:
    _start.append(barrier)


def _call(work: Callable[[dict[str, Any]], dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    try:
        return work(settings)
    except BaseException:
        _start[0].abort()  # so that the other processes do not wait for this one
        raise
