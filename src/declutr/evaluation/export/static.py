"""Table of token vectors made from an encoder and a corpus, without training.

A WordPiece vocabulary of the corpus is made first, so that each of its frequent words is a token. The encoder
embeds each token t; the embeddings are reduced to their principal components c(t), and each is weighted by the token's
share p(t) of the corpus, as in SIF (Arora et al. 2017): v(t) = c(t) a / (a + p(t)), a = 1e-4.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from declutr.common.errors import EncoderError
from declutr.common.storage import write_json
from declutr.encoders.exported import MODULE, TABLE, WEIGHT
from declutr.encoders.protocol import SentenceEncoder
from declutr.encoders.transformer import TransformerEncoder

_CONTINUED, _UNKNOWN = "##", "[UNK]"
_A = 1e-4
_MIN_TOKENS = 100


def write_static(
    encoder: SentenceEncoder, texts: Sequence[str], folder: Path, vocabulary_size: int, dimensions: int
) -> None:
    """Write the table, its tokenizer, and the files by which sentence-transformers loads them.

    Args:
        encoder: embeds the tokens.
        texts: corpus whose tokens are counted.
        folder: existing folder.
        vocabulary_size: most tokens.
        dimensions: most numbers of an embedding.

    Raises:
        EncoderError: the corpus has too few different words.
    """
    tokenizer = _tokenizer(encoder, texts, vocabulary_size)
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    if len(tokens) < _MIN_TOKENS:
        raise EncoderError(f"--corpus: has {len(tokens):,} tokens; a table needs at least {_MIN_TOKENS}")
    counts = np.zeros(len(tokens), np.int64)
    for row in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
        np.add.at(counts, row.ids, 1)
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
    lower = False
    if isinstance(encoder, TransformerEncoder):
        normalizer = json.loads(encoder.engine().to_str())["normalizer"]
        lower = '"lowercase": true' in json.dumps(normalizer) or '"Lowercase"' in json.dumps(normalizer)
    normalizer, pre_tokenizer = normalizers.BertNormalizer(lowercase=lower), pre_tokenizers.BertPreTokenizer()
    counts = Counter(letter for text in texts for letter in normalizer.normalize_str(text) if not letter.isspace())
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
    directions = np.linalg.eigh(centered.T @ centered)[1][:, ::-1][:, :max_components]
    # an eigenvector may have either
    signs = np.sign(directions[np.abs(directions).argmax(axis=0), np.arange(directions.shape[1])])
    components: NDArray[np.float64] = centered @ (directions * signs)
    return components
