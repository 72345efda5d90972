"""Throughput of preparation, from compressed JSONL to shards, against `datasets` and against the tokenizer alone.

    python -m benchmarks.prepare --json OUT [--corpus 'FOLDER/*.jsonl.gz'] [--tokenizer FOLDER] [--rounds 5]

Without a corpus, the documentation of the installed packages is written to compressed JSONL, and a byte-level BPE is
trained on it. All programs take turns in every round. MiB count normalised text in UTF-8. Programs that preparation is
compared with run in processes that start together; each loads its libraries, and for the limit its texts, before it
waits for the others, so start-up is not measured.
"""

import argparse
import glob
import gzip
import hashlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer

from benchmarks import record
from benchmarks.embed import documentation
from declutr.common.console.logs import setup_logging
from declutr.common.session import start_ray
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.filters.document_filter import normalise
from declutr.pipeline.prepare import prepare
from declutr.pipeline.shards.manifest import Manifest
from declutr.pipeline.tokenizer.batch_tokenizer import BatchTokenizer, EngineName, choose_engine, parse
from declutr.pipeline.tokenizer.fast_engines import ByteLevelBPE
from declutr.pipeline.tokenizer.tokenization import fingerprint, load_tokenizer, train_tokenizer

_PROGRAMS = ("warm", "datasets", "limit")
_DEMO_FILES = 8
_DEMO_VOCABULARY = 16_384
_BATCH = 256
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_start: list[Barrier] = []  # in a process of `at_once`: the barrier that all of them pass together


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = record.parser("prepare", __doc__)
    parser.add_argument("--corpus", metavar="GLOB", help="compressed JSONL with the key text")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="a saved tokenizer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="processes per side")
    parser.add_argument(
        "--max-tokens", type=int, default=512, help="longest span; documents hold at least 4 times that"
    )
    options = record.parse(parser, arguments)
    setup_logging("benchmark")
    with tempfile.TemporaryDirectory(prefix="declutr-benchmark-") as folder:
        record.publish(measure(options, Path(folder)), options)


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure all figures."""
    paths, tokenizer, corpus = inputs(options, work)
    start_ray(options.workers)  # on a cluster it runs already
    settings = {
        "paths": paths,
        "tokenizer": tokenizer,
        "workers": options.workers,
        "min_tokens": 4 * options.max_tokens,
    }
    engine, reason = choose_engine(Path(tokenizer), "auto")
    settings |= {"engine": engine, "prefix": BatchTokenizer.load(Path(tokenizer)).prefix}
    manifest = time_prepare(options, settings, work / "warm-up")[1]  # Ray's workers start and import once
    mib = manifest.totals["text_bytes"] / record.MIB
    rates: dict[str, list[float]] = {name: [] for name in _PROGRAMS}
    for number in range(options.rounds):
        where = work / f"round-{number}"
        rates["warm"].append(mib / time_prepare(options, settings, where / "warm")[0])
        rates["limit"].append(mib / engine_alone(settings, where / "limit"))
        if find_spec("datasets"):  # a tool for development, which an install may lack
            result = at_once(datasets, [settings], where / "datasets")[0]
            if (result["documents"], result["tokens"]) != (manifest.totals["kept"], manifest.totals["num_tokens"]):
                # Seconds of other work would be no comparison.
                raise RuntimeError(f"`datasets` kept other documents or tokens: {result}, ours: {manifest.totals}")
            rates["datasets"].append(mib / result["seconds"])
        record.progress(f"round {number}: " + ", ".join(f"{k} {v[-1]:.1f} MiB/s" for k, v in rates.items() if v))
    return {
        "benchmark": "prepare",
        "corpus": corpus,
        "text_mib": round(mib, 1),
        "documents": {key: manifest.totals[key] for key in ("read", "kept", "num_tokens")},
        "workers": options.workers,
        "engine": engine,
        "engine_reason": reason,
        "mib_per_s": round(statistics.median(rates["warm"]), 2) if rates["warm"] else None,
        "ratio_vs_datasets": _ratio(rates["warm"], rates["datasets"])["median"],
        "share_of_limit": _ratio(rates["warm"], rates["limit"])["median"],
        "ratio_vs_datasets_rounds": _ratio(rates["warm"], rates["datasets"]),
        "share_of_limit_rounds": _ratio(rates["warm"], rates["limit"]),
        "rates_mib_per_s": {name: [round(rate, 2) for rate in values] for name, values in rates.items()},
    }


def inputs(options: argparse.Namespace, work: Path) -> tuple[list[str], str, str]:
    """Files of the corpus, folder of the tokenizer, and a description of the corpus."""
    if options.corpus:
        names = glob.glob(str(Path(options.corpus).expanduser()))  # noqa: PTH207
        kind, paths = "files given", sorted(str(Path(path).resolve()) for path in names)
        if not paths:
            raise SystemExit(f"--corpus {options.corpus!r} matches no file")
    else:
        kind, paths = "documentation of the installed packages", _demo_corpus(work / "corpus")
    if options.tokenizer:
        tokenizer = load_tokenizer(options.tokenizer)
    else:
        tokenizer = train_tokenizer(texts_of(paths), _DEMO_VOCABULARY)
    folder = work / f"tokenizer-{fingerprint(tokenizer)[:8]}"
    tokenizer.save_pretrained(str(folder))
    return paths, str(folder), kind


def _demo_corpus(folder: Path) -> list[str]:
    """Write the documentation of the installed packages as compressed JSONL."""
    folder.mkdir()
    texts = [text for text in documentation() if "\0" not in text]  # a failure here, a text for `datasets`
    paths = [str(folder / f"{number}.jsonl.gz") for number in range(_DEMO_FILES)]
    for number, path in enumerate(paths):
        # 6, as the command gzip has
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as stream:
            stream.writelines(json.dumps({"text": text}) + "\n" for text in texts[number::_DEMO_FILES])
    return paths


def time_prepare(options: argparse.Namespace, settings: dict[str, Any], output: Path) -> tuple[float, Manifest]:
    """Time `prepare` in a running session; return seconds and manifest."""
    section = {
        "output": str(output),
        "corpus": {"kind": "files", "paths": settings["paths"]},
        "tokenizer": {"kind": "pretrained", "name": settings["tokenizer"]},
        "geometry": {"num_anchors": 2, "max_tokens": options.max_tokens},
        "session": {"num_cpus": options.workers},
    }
    begun = time.perf_counter()
    manifest = prepare(PipelineConfig.model_validate(section))
    return time.perf_counter() - begun, manifest


def engine_alone(settings: dict[str, Any], cache: Path) -> float:
    """Time the engine alone, in as many processes, on texts in memory."""
    shares = [settings | {"share": share} for share in range(settings["workers"])]
    # the slowest process ends the work
    return max(float(result["seconds"]) for result in at_once(limit, shares, cache))


def texts_of(paths: list[str]) -> Iterator[str]:
    """Normalised texts of compressed JSONL files, in order."""
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            yield from (normalise(json.loads(line)["text"]) for line in lines)


def datasets(settings: dict[str, Any]) -> dict[str, Any]:
    """`load_dataset`, `map` and `filter` in typical use: the same ids, without short documents and copies."""
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
        digests = [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts]
        return {"input_ids": ids, "num_tokens": [len(row) for row in ids], "digest": digests}

    digests = set[bytes]()

    def is_first(digest: bytes) -> bool:
        before = len(digests)
        digests.add(digest)
        return len(digests) > before

    _start[0].wait()
    begun = time.perf_counter()
    loaded = library.load_dataset("json", data_files=settings["paths"], split="train")
    rows = loaded.map(tokenize, batched=True, num_proc=workers, remove_columns=loaded.column_names)
    min_tokens = settings["min_tokens"]
    long = rows.filter(lambda count: count >= min_tokens, input_columns="num_tokens", num_proc=workers)
    kept = long.filter(is_first, input_columns="digest")  # in one process, because the others would not see its set
    return {"seconds": time.perf_counter() - begun, "documents": len(kept), "tokens": sum(kept["num_tokens"])}


def limit(settings: dict[str, Any]) -> dict[str, Any]:
    """Run the engine alone on this process's share of the texts in memory; for ours, tiktoken with GPT-2's pattern."""
    share, workers = settings["share"], settings["workers"]
    texts = [text for index, text in enumerate(texts_of(settings["paths"])) if index % workers == share]
    engine: EngineName = settings["engine"]
    encode: Callable[[list[str]], Any] = BatchTokenizer.load(Path(settings["tokenizer"]), engine).encode
    if engine == "tiktoken":
        plain = ByteLevelBPE(parse(Tokenizer.from_file(str(Path(settings["tokenizer"]) / "tokenizer.json"))))
        encode = plain.engine(_GPT2_PATTERN).encode_ordinary_batch
        encode = partial(encode, num_threads=1)  # a thread a process, as on all sides
    encode(texts[:_BATCH])  # warms up
    _start[0].wait()  # until the others have their texts in memory, too
    begun = time.perf_counter()
    for start in range(0, len(texts), _BATCH):
        encode(texts[start : start + _BATCH])
    return {"seconds": time.perf_counter() - begun}


def at_once(
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


def _ratio(rates: list[float], reference_rates: list[float]) -> dict[str, Any]:
    """Median and range of the quotients within each round."""
    ratios = [a / b for a, b in zip(rates, reference_rates, strict=False)]
    if not ratios:
        return {"median": None, "range": None}
    return {"median": round(statistics.median(ratios), 3), "range": [round(min(ratios), 3), round(max(ratios), 3)]}


if __name__ == "__main__":
    # `datasets` sends a function of `__main__` to its processes with all globals, and a barrier cannot be sent.
    from benchmarks.prepare import main as imported_main

    imported_main()
