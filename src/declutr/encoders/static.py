"""Embeddings by a table of token vectors, in the format of sentence-transformers' StaticEmbedding.

e(x) = 1/n sum_i v(t_i) over the n tokens of x without special ones; 0 for a text without tokens.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from declutr.common.errors import EncoderError
from declutr.common.storage import hash_file, hash_json, read_json
from declutr.encoders.protocol import texts_of

MODULE = "StaticEmbedding"
TABLE, WEIGHT = "model.safetensors", "embedding.weight"
_CHUNK_TEXTS = 8192


def is_static(folder: Path) -> bool:
    """True if the first module of a folder of sentence-transformers is a table of token vectors."""
    try:
        return str(read_json(folder / "modules.json")[0]["type"]).endswith(f".{MODULE}")
    except (OSError, ValueError, LookupError, TypeError):
        return False


class StaticEncoder:
    """Encoder of a folder with a table, its tokenizer, and a normalisation or none.

    Raises:
        EncoderError: a file is missing or damaged, or other modules follow the table.
    """

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        modules = [
            (str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in read_json(folder / "modules.json")
        ]
        kinds, place = [kind for kind, _ in modules], modules[0][1]
        if kinds not in ([MODULE], [MODULE, "Normalize"]):
            raise EncoderError(f"{folder}: its modules are {', '.join(kinds)}; supported are {MODULE} and Normalize")
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise EncoderError(f"{folder}: modules.json names {place}, which is outside of the folder")
        files = folder / place / TABLE, folder / place / "tokenizer.json"
        try:
            table = load_file(files[0])[WEIGHT].float()
            self._tokenizer = Tokenizer.from_file(str(files[1]))
            self._tokenizer.no_padding()
        except (OSError, SafetensorError, KeyError) as error:
            raise EncoderError(f"{files[0]}: is missing or damaged, or holds no {WEIGHT} ({error!r})") from error
        except Exception as error:  # tokenizers raises Exception itself
            raise EncoderError(f"{files[1]}: is missing or damaged ({error})") from error
        if table.ndim != 2 or len(table) < self._tokenizer.get_vocab_size():
            raise EncoderError(
                f"{folder}: its table has {len(table):,} rows, its tokenizer {self._tokenizer.get_vocab_size():,} "
                "tokens; its files belong to different encoders"
            )
        self._table, self.size = table, table.shape[1]
        self._unit = kinds[-1] == "Normalize"
        self.fingerprint = hash_json(["static", self._unit, *map(hash_file, files)])

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings `(len(texts), size)` in the order of the texts."""
        texts = texts_of(texts)
        chunks = [self._of(texts[start : start + _CHUNK_TEXTS]) for start in range(0, len(texts), _CHUNK_TEXTS)]
        return np.concatenate(chunks) if chunks else np.empty((0, self.size), np.float32)

    def _of(self, texts: Sequence[str]) -> NDArray[np.float32]:
        rows = [row.ids for row in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        starts = np.cumsum([0, *map(len, rows[:-1])])
        flat = torch.from_numpy(np.concatenate([np.array(row, np.int64) for row in rows]))
        with torch.inference_mode():
            means = F.embedding_bag(flat, self._table, torch.from_numpy(starts), mode="mean")
            return (F.normalize(means, dim=-1) if self._unit else means).numpy()
