"""Time of `declutr embed`'s encoder against SentenceTransformer.encode, on the same weights and texts.

    python -m benchmarks.embed --json OUT [--model minilm] [--sentences FILE] [--rounds N]

Two workloads, many short sentences and some long paragraphs, come from the documentation of the installed Python
packages or from a file of sentences. Both sides tokenize, encode and give one float32 array on the same cores, in turns
within one run. The weights are drawn from the seed.
"""

import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModel

from benchmarks import record
from declutr.common import seeding
from declutr.common.storage import write_json
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import precision_of
from declutr.pipeline.job.units import UnitReader, plan_units
from declutr.pipeline.readers.corpus import Document
from declutr.pipeline.readers.pydocs import PythonDocs
from declutr.pipeline.tokenizer.tokenization import train_tokenizer
from declutr.trainer.driver.export import sentence_transformers_files

_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "small": {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024},
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "distilroberta": {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072},
}
_SENTENCE = re.compile(r"[A-Z][^.!?\n]{20,300}[.!?]")
_WHITESPACE = re.compile(r"\s+")
_PARAGRAPH_CHARACTERS = 2400
_MAX_TOKENS = 512


def documentation() -> Iterator[str]:
    """Texts of the documentation installed here, as in the demo's corpus."""
    corpus = PythonDocs(kind="python_docs")
    for unit in plan_units(corpus, 1)[0]:
        yield from (record.text for record in UnitReader(unit, corpus) if isinstance(record, Document))


def sentences_of(texts: Iterator[str], count: int) -> list[str]:
    """The first different sentences of 20 to 300 characters."""
    sentences: dict[str, None] = {}
    for text in texts:
        for match in _SENTENCE.finditer(text):
            sentences[_WHITESPACE.sub(" ", match[0])] = None
            if len(sentences) == count:
                return list(sentences)
    return list(sentences)


def paragraphs_of(sentences: list[str], count: int) -> list[str]:
    """Consecutive sentences joined to about 2,400 characters, repeated from the beginning if they run out."""
    paragraphs: list[str] = []
    place = 0
    while len(paragraphs) < count:
        parts: list[str] = []
        while sum(map(len, parts)) < _PARAGRAPH_CHARACTERS:
            parts.append(sentences[place % len(sentences)])
            place += 1
        paragraphs.append(" ".join(parts))
    return paragraphs


def write_encoder(folder: Path, size: str, texts: list[str], vocab_size: int, seed: int) -> None:
    """Write a folder for both libraries: RoBERTa of that size, with a tokenizer trained on the texts."""
    tokenizer = train_tokenizer(texts, vocab_size)
    ids = {name: getattr(tokenizer, name) for name in _IDS}
    # RoBERTa's first two positions are never used
    shape = {"max_position_embeddings": _MAX_TOKENS + 2, "type_vocab_size": 1, **SIZES[size]}
    config = AutoConfig.for_model("roberta", vocab_size=len(tokenizer), **ids, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.torch_seed(seed, "weights"))
        AutoModel.from_config(config).save_pretrained(folder)  # the time of a forward does not depend on them
    tokenizer.save_pretrained(folder)
    for name, value in sentence_transformers_files(int(shape["hidden_size"]), _MAX_TOKENS, "mean").items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_json(folder / name, value)


def compare(
    sides: dict[str, Callable[[list[str]], NDArray[np.float32]]], texts: list[str], rounds: int
) -> dict[str, Any]:
    """Seconds of each side, measured in turns after a warm-up on some texts, and the distance of their vectors."""
    for encode in sides.values():
        encode(texts[:: max(1, len(texts) // 64)])  # warms up
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    vectors: dict[str, NDArray[np.float32]] = {}
    for number in range(rounds):
        # the first side changes, so that neither always runs on a machine warmed by the other
        for name in sorted(sides, reverse=bool(number % 2)):
            begun = time.perf_counter()
            vectors[name] = sides[name](texts)
            seconds[name].append(round(time.perf_counter() - begun, 4))
            record.progress(f"round {number} {name} {len(texts)} texts {seconds[name][-1]:.2f} s")
    return {
        "texts": len(texts),
        "seconds": seconds,
        **record.ratios(seconds["sentence_transformers"], seconds["ours"]),
        **{f"to_{name}": record.ratios(seconds[name], seconds["ours"])["ratio_median"] for name in sides},
        "texts_per_second": round(len(texts) / statistics.median(seconds["ours"]), 1),
        "max_abs_diff": float(np.abs(vectors["ours"] - vectors["sentence_transformers"]).max()),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = record.parser("embed", __doc__)
    parser.add_argument("--model", choices=SIZES, default="minilm", help="size of the encoder")
    parser.add_argument("--sentences", type=Path, help="file with one sentence per line; default: documentation")
    parser.add_argument("--num-sentences", type=int, default=20_000)
    parser.add_argument("--num-paragraphs", type=int, default=2_000)
    parser.add_argument("--vocab-size", type=int, default=16_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = record.parse(parser, arguments)
    from sentence_transformers import SentenceTransformer

    if options.sentences:
        lines = options.sentences.read_text(encoding="utf-8").splitlines()
        sentences = list(dict.fromkeys(line.strip() for line in lines if line.strip()))[: options.num_sentences]
    else:
        sentences = sentences_of(documentation(), options.num_sentences)
    workloads = {"sentences": sentences, "paragraphs": paragraphs_of(sentences, options.num_paragraphs)}
    with tempfile.TemporaryDirectory() as name:
        write_encoder(Path(name), options.model, sentences, options.vocab_size, options.seed)
        reference = SentenceTransformer(name, device=options.device)
        encoder = load_encoder(name, device=options.device)
        sides: dict[str, Callable[[list[str]], NDArray[np.float32]]] = {
            "sentence_transformers": lambda texts: np.asarray(reference.encode(texts, show_progress_bar=False)),
            "ours": encoder.encode,
        }
        if precision_of(encoder) == "bf16":  # theirs as a user would speed it up
            half = SentenceTransformer(name, device=options.device, model_kwargs={"dtype": torch.bfloat16})
            encode = partial(half.encode, batch_size=512, show_progress_bar=False)
            sides["sentence_transformers_bf16"] = lambda texts: np.asarray(encode(texts), np.float32)
        measured = {kind: compare(sides, texts, options.rounds) for kind, texts in workloads.items() if texts}
    ratios = {f"ratio_{kind}": figures["ratio_median"] for kind, figures in measured.items()}
    figures = {
        "model": options.model,
        "device": options.device,
        "ratio": min(ratios.values()),  # the claim is of both workloads
        **ratios,
        "max_abs_diff": max(figures["max_abs_diff"] for figures in measured.values()),
        **measured,
    }
    record.publish(figures, options)


if __name__ == "__main__":
    main()
