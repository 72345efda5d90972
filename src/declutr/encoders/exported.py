"""Encoders that `declutr export` writes: a graph in ONNX, and a table of token vectors; computed on a CPU.

A table is in the format of sentence-transformers' StaticEmbedding: e(x) = 1/n sum_i v(t_i) over the n tokens of x
without special ones; 0 for a text without tokens.
"""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Encoding, Tokenizer

from declutr.common.errors import EncoderError
from declutr.common.storage import hash_file, hash_json, read_json, write_json
from declutr.encoders.protocol import (
    Role,
    Window,
    check_prompts,
    check_vocabulary,
    prompt_of,
    role_prompts,
    texts_of,
    token_counts,
    windows_of,
)
from declutr.trainer.model.behind import ModuleFiles
from declutr.trainer.model.encoder import Encoder

GRAPH = "model.onnx"
SETTINGS = "declutr_onnx.json"
_WINDOW_TOKENS = 256  # tokens of a passage for an encoder that reads texts of any length
_BATCH_TOKENS = 256  # most tokens of a batch, padding included: its activations stay in the processor's cache


def session_of(graph: bytes | Path) -> Any:
    """Session of onnxruntime, which computes with one thread."""
    try:
        import onnxruntime
    except ImportError as error:
        raise EncoderError(f"graphs in ONNX need onnxruntime (pip install onnxruntime): {error}") from error
    options = onnxruntime.SessionOptions()
    # Batches are computed in parallel, so that the bits of one do not depend on the number of cores.
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised too
    try:
        source = graph if isinstance(graph, bytes) else str(graph)
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises any kind for files that it cannot read
        name = "the graph" if isinstance(graph, bytes) else graph
        raise EncoderError(f"{name}: onnxruntime cannot use it ({' '.join(str(error).split())})") from error


class OnnxEncoder:
    """Encoder of a folder with a graph, its tokenizer and its settings."""

    role: Role | None = None

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        try:
            settings = read_json(folder / SETTINGS)
            self.size, self.prompt = int(settings["size"]), str(settings["prompt"])
            self._prompts = {str(key): str(text) for key, text in settings["prompts"].items()}
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._pad = int((self._tokenizer.padding or {}).get("pad_id", 0))
            self._tokenizer.no_padding()  # `padded` does it, by batch
            files = [hash_file(folder / file) for file in (GRAPH, "tokenizer.json")]
        except Exception as error:  # tokenizers raises Exception itself
            raise EncoderError(f"{folder}: is a damaged export to ONNX ({error!r}); export again") from error
        check_prompts(str(folder), {**self._prompts, "": self.prompt})
        if settings.get("tokenizer") != files[1]:
            raise EncoderError(f"{folder}: tokenizer.json is not the one of its graph; export again")
        self._files = files
        self._session = session_of(folder / GRAPH)
        largest = max(self._tokenizer.get_vocab().values(), default=0)
        self._embed([0], [[largest]])  # a graph shows no size of its table, but refuses an id beyond it: now, not later

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the embeddings."""
        return hash_json([*self._files, self.prompt, *role_prompts(self._prompts).items()])

    def in_role(self, role: Role) -> "OnnxEncoder":
        """The encoder with its prompt for queries or documents; itself if it has none of a role."""
        if not role_prompts(self._prompts):
            return self
        encoder = copy.copy(self)
        encoder.role = role
        encoder.prompt = prompt_of(role, self._prompts)
        return encoder

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings `(len(texts), size)` in the order of the texts; 0 for a text without tokens."""
        return self.encode_counted(texts)[0]

    def encode_counted(self, texts: Sequence[str]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Embeddings, and `(len(texts), 2)` tokens of each text and those of them that were read."""
        rows = self._tokenized(texts)
        embeddings = self.embed_ids([row.ids for row in rows])
        return embeddings, np.array(token_counts(rows, self._tokenizer), np.int64).reshape(-1, 2)

    def windows(self, texts: Sequence[str]) -> tuple[list[list[int]], NDArray[np.int64]]:
        """As those of a TransformerEncoder."""
        windows, owners = windows_of(self._tokenized(texts))
        return [window.ids for window in windows], owners

    def _tokenized(self, texts: Sequence[str]) -> list[Encoding]:
        return self._tokenizer.encode_batch_fast([self.prompt + text for text in texts_of(texts)])

    def embed_ids(self, rows: list[list[int]]) -> NDArray[np.float32]:
        """Embeddings `(len(rows), size)` of token ids; 0 for a row without any."""
        batches = batches_of([len(row) for row in rows])
        embeddings = np.zeros((len(rows), self.size), np.float32)  # `batches_of` leaves out rows without tokens
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for batch, vectors in zip(batches, pool.map(lambda batch: self._embed(batch, rows), batches), strict=True):
                embeddings[batch] = vectors
        return embeddings

    @property
    def window(self) -> Window:
        """What it reads of a text."""
        engine = Tokenizer.from_str(self._tokenizer.to_str())
        limit = (engine.truncation or {}).get("max_length", _WINDOW_TOKENS)
        engine.no_truncation()
        return Window(engine, limit - len(engine.encode(self.prompt)))

    def _embed(self, batch: list[int], ids: list[list[int]]) -> NDArray[np.float32]:
        try:
            rows: NDArray[np.float32] = self._session.run(None, padded([ids[place] for place in batch], self._pad))[0]
        except Exception as error:  # onnxruntime raises any kind
            raise EncoderError(
                f"{self.name}: onnxruntime cannot compute it ({' '.join(str(error).split())})"
            ) from error
        return rows


def padded(rows: list[list[int]], pad: int) -> dict[str, NDArray[np.int64]]:
    """Inputs of a graph, `(texts, tokens)` ids and mask."""
    longest = max(map(len, rows))
    shape = len(rows), max(2, longest)  # graphs are traced for two tokens or more
    inputs = {"input_ids": np.full(shape, pad, np.int64), "attention_mask": np.zeros(shape, np.int64)}
    for place, row in enumerate(rows):
        inputs["input_ids"][place, : len(row)] = row
        inputs["attention_mask"][place, : len(row)] = 1
    return inputs


def batches_of(lengths: Sequence[int]) -> list[list[int]]:
    """Places of texts of similar length, without those of length 0.

    A batch ends before it has more than `_BATCH_TOKENS` tokens, and at another length once it has half as many.
    """
    batches: list[list[int]] = []
    for place in np.argsort(lengths, kind="stable").tolist():  # equal lengths have one order everywhere
        length = lengths[place]
        if not length:
            continue
        last = batches[-1] if batches else []
        full = length * (len(last) + 1) > _BATCH_TOKENS
        if not last or full or (length != lengths[last[-1]] and 2 * length * len(last) >= _BATCH_TOKENS):
            batches.append([])
        batches[-1].append(place)
    return batches


MODULE = "StaticEmbedding"
TABLE, WEIGHT = "model.safetensors", "embedding.weight"
_CHUNK_TEXTS = 8192


class StaticEncoder:
    """Encoder of a folder with a table, its tokenizer, and a normalisation or none."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        modules = ModuleFiles(folder.joinpath).modules() or []
        kinds, place = [kind for kind, _ in modules], modules[0][1]
        if kinds not in ([MODULE], [MODULE, "Normalize"]):
            raise EncoderError(f"{folder}: its modules are {', '.join(kinds)}; supported are {MODULE} and Normalize")
        files = folder / place / TABLE, folder / place / "tokenizer.json"
        try:
            table = load_file(files[0])[WEIGHT].float()
            self._tokenizer = Tokenizer.from_file(str(files[1]))
            self._tokenizer.no_padding()
        except (OSError, SafetensorError, KeyError) as error:
            raise EncoderError(f"{files[0]}: is missing or damaged, or holds no {WEIGHT} ({error!r})") from error
        except Exception as error:  # tokenizers raises Exception itself
            raise EncoderError(f"{files[1]}: is missing or damaged ({error})") from error
        vocabulary, ordinary = self._tokenizer.get_vocab(), self._tokenizer.get_vocab(with_added_tokens=False)
        special = vocabulary.keys() - ordinary.keys()
        check_vocabulary(str(folder), vocabulary, len(table) if table.ndim == 2 else 0, special)
        self._table, self.size = table, table.shape[1]
        self._unit = kinds[-1] == "Normalize"
        self.fingerprint = hash_json(["static", self._unit, *map(hash_file, files)])

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings `(len(texts), size)` in the order of the texts."""
        texts = texts_of(texts)
        chunks = [self._means(texts[start : start + _CHUNK_TEXTS]) for start in range(0, len(texts), _CHUNK_TEXTS)]
        return np.concatenate(chunks) if chunks else np.empty((0, self.size), np.float32)

    @property
    def window(self) -> Window:
        """A passage of a usual length, or of what its tokenizer keeps of a text, if that is less."""
        engine = Tokenizer.from_str(self._tokenizer.to_str())
        limit = (engine.truncation or {}).get("max_length", _WINDOW_TOKENS)
        engine.no_truncation()  # in the copy alone: `encode` reads what sentence-transformers reads
        return Window(engine, min(limit, _WINDOW_TOKENS))

    def _means(self, texts: Sequence[str]) -> NDArray[np.float32]:
        rows = [row.ids for row in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        starts = np.cumsum([0, *map(len, rows[:-1])])
        flat = torch.from_numpy(np.concatenate([np.array(row, np.int64) for row in rows]))
        with torch.inference_mode():
            # a text without tokens gives 0
            means = F.embedding_bag(flat, self._table, torch.from_numpy(starts), mode="mean")
            return (F.normalize(means, dim=-1) if self._unit else means).numpy()


def token_means(name: str, encoder: Encoder, tokenizer: Any) -> StaticEncoder:
    """The mean of the token vectors that an encoder's layers read."""
    with TemporaryDirectory() as folder:
        table = encoder.model.get_input_embeddings().weight.detach().contiguous()
        save_file({WEIGHT: table}, Path(folder, TABLE))
        tokenizer.backend_tokenizer.save(str(Path(folder, "tokenizer.json")))
        write_json(Path(folder, "modules.json"), [{"path": "", "type": f"sentence_transformers.models.{MODULE}"}])
        means = StaticEncoder(Path(folder))
    means.name = name
    return means
