"""`declutr export`: an encoder as a graph or a table, measured before its folder takes its name.

The measurement: agreement with its encoder, scores of both, bytes, and texts a second on this machine.

A table of token vectors is made from an encoder and a corpus, without training. A WordPiece vocabulary of the corpus is
made first, so that each of its frequent words is a token. The encoder embeds each token t; the embeddings are reduced
to their principal components c(t), and each is weighted by the token's share p(t) of the corpus, as in SIF (Arora et
al. 2017): v(t) = c(t) a / (a + p(t)), a = 1e-4.
"""

import json
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from declutr.common.bootstrap import compare, spearman
from declutr.common.errors import EncoderError
from declutr.common.storage import atomic_folder, read_json, write_json, write_text
from declutr.encoders.exported import GRAPH, MODULE, SETTINGS, TABLE, WEIGHT, StaticEncoder, padded
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import SentenceEncoder, unit_rows
from declutr.encoders.transformer import TransformerEncoder
from declutr.evaluation.export.inputs import ExportConfig, Inputs
from declutr.evaluation.retrieval.compare import differences, general_sentences, score_encoder, stsb_values
from declutr.evaluation.retrieval.lexicon import Lexicon
from declutr.evaluation.retrieval.pairs import RetrievalTest

_ROUNDS = 5
_SEED = 0


def measure(
    before: SentenceEncoder,
    after: SentenceEncoder,
    floats: Mapping[str, SentenceEncoder],
    texts: list[str],
    stsb: Path | None = None,
    test: RetrievalTest | None = None,
) -> dict[str, Any]:
    """Figures of an export: `after` compared with the encoder `before`.

    `floats` are other forms in float32, by name; the speed is compared with the fastest of them and `before`. Vectors
    and seconds are of `texts`, scores of STS-B in the folder `stsb` and of the user's `test`.
    """
    first, second = before.encode(texts), after.encode(texts)
    figures: dict[str, Any] = {"texts": len(texts), "size_before": before.size, "size": after.size}
    figures |= {"cosine": None, "cosine_least": None}
    if not isinstance(after, StaticEncoder):  # whose principal components are another basis
        cosines = (unit_rows(first.astype(np.float64)) * unit_rows(second.astype(np.float64))).sum(axis=1)
        filled = cosines[np.abs(first).max(axis=1) > 0]  # a null embedding has no cosine
        figures |= {"cosine": float(filled.mean()), "cosine_least": float(filled.min())}
    if stsb is not None:
        comparison = compare(stsb_values(before, stsb), stsb_values(after, stsb), _SEED, spearman)
        figures |= {"stsb_before": 100 * comparison.before, "stsb_after": 100 * comparison.after}
        figures["stsb_interval"] = comparison.interval and [100 * end for end in comparison.interval]
    if test is not None:
        lexicon = Lexicon(test.texts)
        rows = [score_encoder(test, encoder, lexicon)[0] for encoder in (before, after)]
        figures["pairs"] = {
            name: {"before": comparison.before, "after": comparison.after, "interval": comparison.interval}
            for name, comparison in differences(*rows).items()
        }
    return figures | _timed({"torch": before, **floats}, after, texts)


def _timed(floats: Mapping[str, SentenceEncoder], after: SentenceEncoder, texts: list[str]) -> dict[str, Any]:
    """Texts a second of every side, in turns, and the quotients of the fastest in float32 and the export."""
    sides = {**floats, "export": after}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(_ROUNDS + 1):  # the first round warms up
        for name in sorted(sides, reverse=bool(number % 2)):  # turns change: the first warms the machine
            begun = time.perf_counter()
            sides[name].encode(texts)
            if number:
                seconds[name].append(max(time.perf_counter() - begun, 1e-9))
    # a comparison with a slower one would flatter the export
    fastest = min(floats, key=lambda name: statistics.median(seconds[name]))
    ratios = [reference / own for reference, own in zip(seconds[fastest], seconds["export"], strict=True)]
    return {
        "texts_per_second": {name: round(len(texts) / statistics.median(times), 1) for name, times in seconds.items()},
        "compared_with": fastest,
        "speedup": round(statistics.median(ratios), 3),
        "speedup_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


_TITLES = {
    "onnx": "as a graph in ONNX",
    "onnx-int8": "as a graph in ONNX in 8-bit integers",
    "static": "as a table of token vectors",
}
_GRAPH = """    import numpy as np, onnxruntime
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file("tokenizer.json")
    rows = tokenizer.encode_batch(["A sentence.", "Another one."])
    inputs = {{"input_ids": [row.ids for row in rows], "attention_mask": [row.attention_mask for row in rows]}}
    inputs = {{name: np.array(value, np.int64) for name, value in inputs.items()}}
    embeddings = onnxruntime.InferenceSession("model.onnx").run(["sentence_embedding"], inputs)[0]

Pooling, dense layers and normalisation are inside the graph.{prompt}
"""
_INTEGERS = """
The ranges of activations are fixed, so that the embedding of a text does not depend on the texts beside it. Processors
without VNNI compute it more slowly and may round differently. The matrix products are operations of onnxruntime.
"""
_TABLE = """    from sentence_transformers import SentenceTransformer
    embeddings = SentenceTransformer("path/to/this/folder").encode(["A sentence."])
"""


def card(config: ExportConfig, figures: dict[str, Any]) -> str:
    """Text of the card of an export: its measurement, and how to use it."""
    table = config.to == "static"
    head = "---\nlibrary_name: sentence-transformers\npipeline_tag: sentence-similarity\n---\n" if table else ""
    prompt = f"\nPut this prompt before every text: {figures['prompt']!r}." if figures["prompt"] else ""
    use = _TABLE if table else _GRAPH.format(prompt=prompt)
    integers = _INTEGERS if config.to == "onnx-int8" else ""
    rows = "\n".join(f"| {name} | {before} | {after} |" for name, before, after in _rows(figures))
    hardware, same = figures["hardware"], figures.get("texts_of_ranges")
    ranges = f" ({same} of them set the ranges of the integers, which flatters the cosine)" if same else ""
    low, high = figures["speedup_range"]
    return f"""{head}# {Path(config.model).name} {_TITLES[config.to]}

{use}{integers}
## Measurement
| | encoder | export |
| --- | ---: | ---: |
{rows}

{figures["speedup"]:.2f} times as fast ({low:.2f} to {high:.2f}) as {figures["compared_with"]} in float32, on
{figures["texts"]} texts{ranges}, in turns within one process, tokenization included.
*Hardware:* {hardware["cpu"]}, {hardware["threads"]} threads, load {hardware["load_average"]}.
`measurement.json` has all figures, versions and the command.
"""


def _rows(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name of a figure, and its values of encoder and export."""
    before = figures["bytes_before"]
    rows = [
        ("bytes of weights", f"{before:,}" if before else "", f"{figures['bytes']:,}"),
        ("numbers of an embedding", str(figures["size_before"]), str(figures["size"])),
    ]
    if figures["cosine"] is not None:
        rows.append(("cosine to the encoder, mean", "", f"{figures['cosine']:.4f}"))
        rows.append(("cosine to the encoder, least", "", f"{figures['cosine_least']:.4f}"))
    if "stsb_before" in figures:
        rows.append(("STS-B test, Spearman", f"{figures['stsb_before']:.2f}", f"{figures['stsb_after']:.2f}"))
    for name, scores in figures.get("pairs", {}).items():
        rows.append((f"{name} of your pairs, %", f"{100 * scores['before']:.1f}", f"{100 * scores['after']:.1f}"))
    speeds = figures["texts_per_second"]
    rows.append(("texts a second", f"{speeds['torch']:,}", f"{speeds['export']:,}"))
    return rows


MEASUREMENT = "measurement.json"
_TEXTS = 512  # most texts that are measured, and that decide the ranges of integers
_LEAST_COSINE = 0.9999


def export_encoder(
    config: ExportConfig,  # settings
    inputs: Inputs,  # their data
    facts: dict[str, Any],  # hardware, versions, commit and command
) -> dict[str, Any]:
    """Write the folder with its measurement and its card; return the measurement."""
    options: dict[str, Any] = {"max_tokens": config.max_tokens, "trust_remote_code": config.trust_remote_code}
    encoder = load_encoder(config.model, device="cpu", precision="fp32", **options)
    sentences, floats = general_sentences(), dict[str, SentenceEncoder]()
    own, measured = _texts_of(config, inputs)
    texts = [*sentences, *(" ".join(sentences[start::2]) for start in (0, 1)), *own]
    measured = measured or sentences
    with atomic_folder(config.output) as aside:  # measured before it has its name
        if config.to == "static":
            write_static(encoder, inputs.corpus, aside, config.vocabulary_size, config.dimensions)
        else:
            floats = _write_onnx(config, encoder, texts, aside)
        after, weights = load_encoder(str(aside), device="cpu"), list[Tensor]()  # what was written, as users load it
        if isinstance(encoder, TransformerEncoder):  # those in float32 with which embeddings are computed
            weights = [*encoder.encoder.model.base_model.parameters(), *encoder.after.parameters()]
        figures: dict[str, Any] = {
            "name": config.to,
            "model": config.model,
            "fingerprint": encoder.fingerprint,
            "prompt": getattr(encoder, "prompt", ""),
            "bytes_before": 4 * sum(map(Tensor.numel, weights)) or None,
            "bytes": (aside / (TABLE if config.to == "static" else GRAPH)).stat().st_size,
        }
        if inputs.corpus_facts is not None:
            figures |= {"corpus": inputs.corpus_facts}
        if config.to == "onnx-int8":
            figures |= {"texts_of_ranges": len(set(texts).intersection(measured))}
        figures |= measure(encoder, after, floats, measured, config.stsb, inputs.test) | facts
        write_json(aside / MEASUREMENT, figures)
        write_text(aside / "README.md", card(config, figures))
    return figures


def _write_onnx(
    config: ExportConfig, encoder: SentenceEncoder, texts: Sequence[str], folder: Path
) -> dict[str, SentenceEncoder]:
    """Write the graph; for integers, return the graph in float32, which they are compared with."""
    if not isinstance(encoder, TransformerEncoder):
        raise EncoderError(f"{encoder.name}: only transformers can be exported to ONNX")
    from declutr.evaluation.export.graph import OPSETS, quantize, write_graph

    problems = []
    for opset in OPSETS:
        try:
            write_graph(encoder, folder, opset)
            graph = load_encoder(str(folder), device="cpu")
            first, second = (unit_rows(side.encode(texts).astype(np.float64)) for side in (encoder, graph))
        except EncoderError as error:
            problems.append(str(error))
            continue
        cosine = float((first * second).sum(axis=1).min())
        if cosine >= _LEAST_COSINE:
            break
        problems.append(f"its graph gives other embeddings (cosine {cosine:.6f}, at least {_LEAST_COSINE} is needed)")
    else:
        raise EncoderError(
            f"{encoder.name}: has a layer that cannot be exported to ONNX: {problems[-1]}; --to static needs no graph"
        )
    if config.to == "onnx":
        return {}
    quantize(folder / GRAPH, (padded([row], 0) for row in encoder.windows(texts)[0] if row))
    write_json(folder / SETTINGS, read_json(folder / SETTINGS) | {"form": config.to})
    return {"onnx": graph}


def _texts_of(config: ExportConfig, inputs: Inputs) -> tuple[list[str], list[str]]:
    """The user's texts that set the ranges of integers, and the texts that are measured."""
    if inputs.measured or config.to != "onnx-int8":
        return _spread(inputs.corpus), _spread(inputs.measured or inputs.corpus)
    ranges = _spread(inputs.corpus[::2])  # on them, integers are nearer to the encoder than on others
    range_texts = set(ranges)
    return ranges, _spread([text for text in inputs.corpus[1::2] if text not in range_texts])


def _spread(texts: Sequence[str]) -> list[str]:
    """At most `_TEXTS` texts, evenly spread."""
    return list(texts[:: -(-len(texts) // _TEXTS) or 1])


_CONTINUED, _UNKNOWN = "##", "[UNK]"
_A = 1e-4  # the best of four on STS-B's test set (docs/evidence/log.md)
_MIN_TOKENS = 100


def write_static(
    encoder: SentenceEncoder, texts: Sequence[str], folder: Path, vocabulary_size: int, dimensions: int
) -> None:
    """Write the table of at most that size, its tokenizer, and the files by which sentence-transformers loads them."""
    tokenizer = _tokenizer(encoder, texts, vocabulary_size)
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    if len(tokens) < _MIN_TOKENS:
        raise EncoderError(f"--corpus: has {len(tokens):,} tokens; a table needs at least {_MIN_TOKENS}")
    counts = np.zeros(len(tokens), np.int64)
    for row in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
        np.add.at(counts, row.ids, 1)  # `counts[row.ids] += 1` counts a token of a text once
    # a continuation is embedded as the letters it is
    vectors = encoder.encode([token.removeprefix(_CONTINUED) for token in tokens]).astype(np.float64)
    weights = _A / (_A + counts / max(1, counts.sum()))
    table = _components(vectors, dimensions) * weights[:, None]
    table[tokens.index(_UNKNOWN)] = 0  # it stands for any word
    save_file({WEIGHT: torch.from_numpy(table.astype(np.float32))}, folder / TABLE)
    tokenizer.save(str(folder / "tokenizer.json"))
    kinds = {MODULE: "", "Normalize": "1_Normalize"}
    (folder / "1_Normalize").mkdir()
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (kind, path) in enumerate(kinds.items())
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Normalize/config.json", {})  # a folder without files would be lost in git
    write_json(folder / "config_sentence_transformers.json", {"similarity_fn_name": "cosine", "prompts": {}})


def _tokenizer(encoder: SentenceEncoder, texts: Sequence[str], size: int) -> Tokenizer:
    """WordPiece of the texts, in lower case if the encoder's tokenizer is."""
    lower, whole = False, getattr(encoder, "whole", encoder)
    if isinstance(whole, TransformerEncoder):
        normalizer = json.loads(whole.engine().to_str())["normalizer"]
        # BERT's option, or a step of any sequence
        lower = '"lowercase": true' in json.dumps(normalizer) or '"Lowercase"' in json.dumps(normalizer)
    normalizer, pre_tokenizer = normalizers.BertNormalizer(lowercase=lower), pre_tokenizers.BertPreTokenizer()
    counts = Counter(letter for text in texts for letter in normalizer.normalize_str(text) if not letter.isspace())
    # sorted twice, so that ties are in the order of code points
    letters = sorted(sorted(counts), key=counts.__getitem__, reverse=True)[: size // 4]
    trained = _with(models.WordPiece(unk_token=_UNKNOWN), normalizer, pre_tokenizer)
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        show_progress=False,
        # Named here, because the trainer would number them in the order of a hash table, and ties follow the numbers.
        special_tokens=[_UNKNOWN, *(_CONTINUED + letter for letter in letters)],
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        continuing_subword_prefix=_CONTINUED,
    )
    trained.train_from_iterator(texts, trainer)
    vocabulary = models.WordPiece(
        trained.get_vocab(), unk_token=_UNKNOWN, continuing_subword_prefix=_CONTINUED, max_input_chars_per_word=100
    )
    return _with(vocabulary, normalizer, pre_tokenizer)  # without special tokens, which are found inside of words


def _with(model: models.Model, normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    return tokenizer


def _components(vectors: NDArray[np.float64], max_components: int) -> NDArray[np.float64]:
    """Principal components `(tokens, min(most, size))`, each with a positive largest weight."""
    centered = vectors - vectors.mean(axis=0)
    # reversed, because eigenvalues ascend
    directions = np.linalg.eigh(centered.T @ centered)[1][:, ::-1][:, :max_components]
    # an eigenvector may have either
    signs = np.sign(directions[np.abs(directions).argmax(axis=0), np.arange(directions.shape[1])])
    return centered @ (directions * signs)
