"""Embeddings by a transformer: batches by token budget, without padding if the encoder can pack."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from torch import nn

from declutr.common.config import Precision
from declutr.common.console.logs import get_logger
from declutr.common.errors import EncoderError
from declutr.common.storage import hash_json, read_json, write_json
from declutr.encoders.protocol import (
    LongTexts,
    Role,
    Window,
    prompt_of,
    role_prompts,
    texts_of,
    token_counts,
    windows_of,
)
from declutr.trainer.data.batches import SpanBatch
from declutr.trainer.data.packedbatch import pieces
from declutr.trainer.driver.export import write_encoder
from declutr.trainer.model.behind import Dense, Normalize, Step, write_steps
from declutr.trainer.model.encoder import Encoder

_CPU_BATCH_TOKENS = 2048  # keeps the activations of a batch in the processor's cache
_GPU_BATCH_TOKENS = 65536


@dataclass(frozen=True)
class TransformerEncoder:
    """Encoder with its tokenizer."""

    name: str
    encoder: Encoder  # encoder in evaluation mode
    tokenizer: Any
    max_tokens: int  # Maximum tokens of one input, including special tokens
    # Treatment of longer inputs. cut: only their beginning is used. windows: they are read in consecutive windows w of
    # max_tokens, and e(x) = sum_w n_w e(w) / sum_w n_w with n_w the tokens of w without special tokens; if the encoder
    # ends in a normalisation, the result is normalised too.
    long_texts: LongTexts = "cut"
    after: nn.Sequential = field(default_factory=nn.Sequential)  # steps after pooling: dense layers, normalisation
    prompt: str = ""  # text put before every text
    embedding_size: int | None = None  # numbers in an embedding; None: the transformer's hidden size
    # Parts of its files that do not affect an embedding (heads), with their numbers of weights.
    unused: tuple[str, ...] = ()
    # bf16: the transformer's matrix products are computed in bfloat16, on a CPU the whole transformer. Pooling and the
    # steps after it stay in float32.
    precision: Precision = "fp32"
    half: Encoder | None = None  # the encoder that computes on a CPU in bf16; None: `encoder` does
    # Number of texts that are tokenized while those before are computed, on a device that works alongside; None: all
    # texts are tokenized first.
    chunk_texts: int | None = None
    pretrained: str = ""  # name of the encoder from which it was trained, if its settings name one
    prompts: dict[str, str] = field(default_factory=dict)  # all prompts by name, of which `in_role` takes one
    role: Role | None = None  # Role of the texts
    # False: the tokens of a prompt, and the special ones before it, are left out of the pooling (mean, max).
    pools_prompt: bool = True

    @property
    def size(self) -> int:
        """Numbers in an embedding."""
        return self.embedding_size or self.encoder.output_size

    def in_role(self, role: Role) -> "TransformerEncoder":
        """The encoder with its prompt for queries or documents; itself if it has none of a role."""
        if not role_prompts(self.prompts) or role == self.role:
            return self
        if role not in self._in_roles:  # once: each has a copy of the tokenizer, and a service asks for every query
            self._in_roles[role] = replace(self, prompt=prompt_of(role, self.prompts), role=role)
        return self._in_roles[role]

    @cached_property
    def _in_roles(self) -> dict[Role, "TransformerEncoder"]:
        return {}

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return next(self.encoder.parameters()).device

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of weights, tokenizer and settings."""
        digest = hashlib.sha256()
        for module in (self.encoder, self.after):
            for key, value in sorted(module.state_dict().items()):
                digest.update(key.encode() + str(value.dtype).encode())
                digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy())  # NumPy has no bfloat16
        volatile = ("transformers_version", "dtype", "architectures")  # differ by version, not by embedding
        model = self.encoder.model.config.to_dict()
        settings = {
            "weights": digest.hexdigest(),
            "tokenizer": self._engine.to_str(),
            "model": {key: str(value) for key, value in model.items() if key[0] != "_" and key not in volatile},
            "pooling": self.encoder.config.pooling,
            "after": str(self.after),
            "prompt": self.prompt,
            "long_texts": self.long_texts,
        }
        if prompts := role_prompts(self.prompts):  # they decide what a query or a document becomes
            settings |= {"prompts": prompts, "pools_prompt": str(self.pools_prompt)}
        return hash_json(settings)

    @cached_property
    def _engine(self) -> Tokenizer:
        return self.engine()

    def engine(self) -> Tokenizer:
        """Tokenizer without the wrapper of transformers, which takes twice as long for short texts."""
        engine = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        engine.no_padding()
        engine.enable_truncation(self.max_tokens, direction=self.tokenizer.truncation_side)
        return engine

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings `(len(texts), size)` in the order of the texts; an empty text consists of its special tokens.

        A text without any token, which needs a tokenizer without special tokens around a text, has the embedding 0.
        """
        return self.encode_counted(texts)[0]

    def encode_counted(self, texts: Sequence[str]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Embeddings as of `encode`, and `(len(texts), 2)` tokens of each text and those of them that were read.

        Special tokens are not counted; those of a prompt are.
        """
        texts = texts_of(texts)
        if self.role is None and (prompts := role_prompts(self.prompts)):
            _say_prompts(self.name, self.prompt, ", ".join(f"{key} {text!r}" for key, text in prompts.items()))
        if not texts:
            return np.empty((0, self.size), np.float32), np.empty((0, 2), np.int64)
        size = self.chunk_texts or len(texts)
        parts, counts, chunks = [], [], [texts[start : start + size] for start in range(0, len(texts), size)]
        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(self._tokenized, chunks[0])
            for number in range(1, len(chunks) + 1):
                rows = following.result()
                if number < len(chunks):
                    following = pool.submit(self._tokenized, chunks[number])
                parts.append(self._of_rows(rows))
                counts += token_counts(rows, self._engine)
        tokens = np.array(counts, np.int64)
        if self.long_texts == "windows":
            tokens[:, 1] = tokens[:, 0]
        return np.concatenate(parts), tokens

    @cached_property
    def window(self) -> Window:
        """What it reads of a text."""
        engine = self.engine()
        engine.no_truncation()
        return Window(engine, self.max_tokens - len(engine.encode(self.prompt)))

    def windows(self, texts: Sequence[str]) -> tuple[list[list[int]], NDArray[np.int64]]:
        """Token ids of texts, special ones included, in consecutive windows of at most `max_tokens`, and their owners.

        Returns:
            The windows, and `(n,)` the number of the text of each, ascending; a text has at least one.
        """
        windows, owners = windows_of(self._tokenized(texts))
        return [window.ids for window in windows], owners

    def _tokenized(self, texts: Sequence[str]) -> list[Encoding]:
        return self._engine.encode_batch_fast([self.prompt + text for text in texts] if self.prompt else list(texts))

    def _of_rows(self, rows: list[Encoding]) -> NDArray[np.float32]:
        """Embeddings of tokenized texts, `(len(rows), size)`."""
        unpooled = self.unpooled
        if self.long_texts == "cut" or not any(row.overflowing for row in rows):
            return self.embed_ids([row.ids for row in rows], unpooled)
        flat, owners = windows_of(rows)
        weights = np.array([len(window.ids) - sum(window.special_tokens_mask) for window in flat], np.float64)
        weights = np.maximum(weights, np.bincount(owners)[owners] == 1)  # an empty text has one window without tokens
        totals = np.zeros((len(rows), self.size), np.float64)
        np.add.at(totals, owners, self.embed_ids([row.ids for row in flat]) * weights[:, None])
        means = totals / np.bincount(owners, weights)[:, None]
        if len(self.after) and isinstance(self.after[-1], Normalize):
            means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
        return means.astype(np.float32)

    @cached_property
    def unpooled(self) -> int:
        """Tokens at the beginning of a text that are not pooled: those of a prompt, and the special ones before it."""
        if self.pools_prompt or not self.prompt:
            return 0
        if self.long_texts == "windows":
            raise EncoderError(
                f"{self.name}: leaves its prompt out of the pooling, and only the first window has it; use "
                "long_texts = cut, or --passages of `declutr embed`"
            )
        row = self._engine.encode(self.prompt)
        if len(row) >= self.max_tokens:
            raise EncoderError(f"{self.name}: its prompt fills the {self.max_tokens} tokens that it reads")
        return len(row) - row.special_tokens_mask[-1]

    def embed_ids(self, rows: list[list[int]], unpooled: int = 0) -> NDArray[np.float32]:
        """Embeddings `(len(rows), size)` of rows of token ids, special ones included; 0 for a row without tokens.

        The first `unpooled` tokens of each row, which must have more, are read and not pooled.
        """
        if not rows:
            return np.empty((0, self.size), np.float32)
        if not all(rows):
            embeddings = np.zeros((len(rows), self.size), np.float32)
            filled = [place for place, row in enumerate(rows) if row]
            if filled:
                embeddings[filled] = self.embed_ids([rows[place] for place in filled], unpooled)
            return embeddings
        device = self.device
        budget = _CPU_BATCH_TOKENS if device.type == "cpu" else _GPU_BATCH_TOKENS
        lengths = np.array([len(row) for row in rows])
        order = np.argsort(lengths, kind="stable")  # inputs of one length share one attention call
        flat = torch.from_numpy(np.concatenate([np.array(rows[place], np.int64) for place in order]))
        ordered = torch.from_numpy(lengths[order])
        nothing = torch.empty(0, dtype=torch.int64)  # no token is to be predicted
        # spans of one length need no mask and no rearrangement in attention
        cuts = pieces(lengths[order].tolist(), budget, by_length=True)
        batches = SpanBatch(flat, ordered, nothing, nothing).slices(cuts)

        computing = self.half or self.encoder

        def embed(batch: SpanBatch) -> torch.Tensor:
            with torch.inference_mode():  # a thread has its own
                cast = self.precision == "bf16" and computing is self.encoder
                with torch.autocast(device.type, torch.bfloat16, enabled=cast):
                    pooled = _embed(computing, batch.to(device), unpooled)
                return self.after(pooled).float()

        embeddings = np.empty((len(rows), self.size), np.float32)
        if device.type == "cpu":
            # Divided between batches, never inside one: the same bits on two cores as on sixty-four.
            with _single_threads() as pool:
                parts = list(pool.map(embed, batches))
        else:
            parts = [embed(batch) for batch in batches]  # copied once at the end, so that the device never waits
        embeddings[order] = torch.cat(parts).cpu().numpy()
        return embeddings


def _embed(encoder: Encoder, spans: SpanBatch, unpooled: int) -> torch.Tensor:
    """Embeddings of spans, `(S, output_size)`, without the first tokens of each."""
    if not unpooled:
        return encoder.embed(spans)
    hidden = encoder.hidden(spans)[spans.table.places >= unpooled]
    return encoder.behind(encoder.pool(hidden, spans.table.lengths - unpooled))


@lru_cache
def _say_prompts(name: str, default: str, prompts: str) -> None:
    before = f"{default!r} goes" if default else "no prompt goes"
    get_logger().warning("%s: %s before these texts; its prompts by role are %s", name, before, prompts)


@contextmanager
def _single_threads() -> Iterator[ThreadPoolExecutor]:
    """Pool with as many threads as torch would use, each computing alone."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(before, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def write_transformer(encoder: TransformerEncoder, more: Sequence[Step], folder: Path) -> None:
    """Write the encoder to an empty folder, with its own steps behind the pooling and then `more`."""
    write_encoder(encoder.encoder, encoder.tokenizer, folder)
    settings = read_json(folder / "config.json")
    # A dense layer mixes the numbers of which the first ones were an embedding too.
    if any(isinstance(step, Dense) for step in more) and settings.pop("matryoshka_dimensions", None):
        write_json(folder / "config.json", settings)
    limits = read_json(folder / "sentence_bert_config.json")
    write_json(folder / "sentence_bert_config.json", limits | {"max_seq_length": encoder.max_tokens})
    if not encoder.pools_prompt:
        kind, pooled = "1_Pooling/config.json", read_json(folder / "1_Pooling/config.json")
        write_json(folder / kind, pooled | {"include_prompt": False})
    default = "" if encoder.role else encoder.prompt
    if encoder.prompts or default:
        options = read_json(folder / "config_sentence_transformers.json") | {"prompts": encoder.prompts}
        if default:
            options["prompts"] = {**encoder.prompts, "default": default}
            options["default_prompt_name"] = "default"
        write_json(folder / "config_sentence_transformers.json", options)
    write_steps(folder, [*encoder.after, *more])
