"""Programs that preparation is compared with, each in separate processes that wait for a start signal.

    python -m benchmarks.others datasets|limit SETTINGS_AS_JSON

A process loads its libraries, and for the limit its texts, prints that it is ready, waits for a line on its input, and
prints its figures. So start-up is not measured.
"""

import glob
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pipeline.choosing.whitespace import normalise
from pipeline.tokenizer.batch_tokenizer import BatchTokenizer, EngineName
from pipeline.tokenizer.bytelevel import ByteLevelBPE, parse

_READY, _FIGURES = "declutr ready", "declutr figures: "
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

    _wait()
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
    _wait()
    begun = time.perf_counter()
    for start in range(0, len(texts), _BATCH):
        encode(texts[start : start + _BATCH])
    return {"seconds": time.perf_counter() - begun}


def run(name: str, settings: list[dict[str, Any]], cache: Path) -> list[dict[str, Any]]:
    """Run processes with these settings, started at the same time; return their figures.

    Raises:
        RuntimeError: a process failed; its message is on stderr.
    """
    # Empty caches in every round, and only the threads of the counted processes.
    environment = os.environ | {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "benchmarks.others", name]
    children = [
        subprocess.Popen(
            [*command, json.dumps(given)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for given in settings
    ]
    try:
        for child in children:
            _line(child, _READY)
        for child in children:
            if child.stdin:
                child.stdin.write("\n")
                child.stdin.flush()
        return [json.loads(_line(child, _FIGURES)) for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()


def _line(child: subprocess.Popen[str], beginning: str) -> str:
    """Return the rest of the first line with this prefix."""
    for line in child.stdout or ():
        if line.startswith(beginning):
            return line.removeprefix(beginning).strip()
    raise RuntimeError(f"{child.args!r} ended before it printed {beginning!r}")


def _wait() -> None:
    """Print that this process is ready and wait for the start signal."""
    print(_READY, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    print(
        _FIGURES + json.dumps({"datasets": datasets, "limit": limit}[sys.argv[1]](json.loads(sys.argv[2]))), flush=True
    )
