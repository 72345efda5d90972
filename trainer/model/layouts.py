"""Selects the layout that an encoder computes correctly, by a test on artificial spans before training or embedding.

Another test finds families that drop values by torch's random numbers instead of by the keys of their tokens.

The reference is each span alone, where nothing can leak in and no padding exists. No flag shows how families differ:
some ignore the packed layout and attend to the whole row, and some attend to padding.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from declutr.common.errors import EncoderError
from declutr.trainer.data.batches import AnyBatch, PatchBatch, SpanBatch
from declutr.trainer.model.encoder import Encoder, mlm_head
from declutr.trainer.model.frontend import Frontend
from declutr.trainer.model.language_model import FAMILIES, max_span_tokens

Layout = Literal["packed", "padded"]
# Relative to the largest entry. For 30 untrained families, rounding was at most 3e-6 and the smallest leak 5e-4.
_TOLERANCE = 2e-5
_LENGTHS = [3, 7, 5, 7]  # two of one length, so that padding alone does not tell spans apart
_MOST_TOKENS = 512  # limit for the span that is longer than a local attention's window
# Errors that the code of a family may raise when it cannot compute a layout.
_CANNOT = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError)


def embedding_layout(
    encoder: Encoder,  # the encoder with its weights; it is left unchanged
) -> Layout:
    """Layout for embedding texts, in which a batch gives each text the same embedding as alone: packed, else padded.

    With broken weights no layout can be tested. Then padded is used, and the embeddings show that they are not finite.
    """
    with _Trial(encoder) as trial:
        if trial.equals_alone("packed"):
            return "packed"
        if trial.equals_alone("padded") or trial.is_broken():
            return "padded"
        raise EncoderError(_unequal(encoder, "a text's embedding changes with the other texts", trial.why))


def fitting_layout(
    encoder: Encoder,  # the encoder with its initial weights; it is left unchanged
    mlm: bool,  # True if its MLM head is trained
) -> Layout:
    """Layout for training: packed if the configuration asks for it and the test passes, else padded."""
    kind, layout = encoder.model.config.model_type, encoder.config.layout
    advice = f"use another encoder, for example of type {', '.join(FAMILIES[:5])}"
    with _Trial(encoder) as trial:
        if mlm and not trial.head_is_whole():
            raise EncoderError(
                f"model type {kind}: the loss of its MLM head cannot be computed here{trial.why}; train "
                f"without MLM, or {advice}"
            )
        if layout == "packed" and trial.equals_alone("packed") and trial.trains("packed"):
            return "packed"
        if not trial.equals_alone("padded"):
            problem = _unequal(encoder, "a span's embedding changes with the other spans", trial.why)
            raise EncoderError(f"{problem}; {advice}")
        if not trial.trains("padded"):
            raise EncoderError(f"model type {kind}: its forward fails in training{trial.why}; {advice}")
        return "padded"


def patch_problem(
    encoder: Encoder,  # the encoder in the layout that fits it; it is left unchanged
    frontend: Frontend,  # the frontend of a task
) -> str | None:
    """The reason why the encoder's layers cannot read patches, or None."""
    # No two patches alike: a mix would show.
    values = torch.linspace(-1, 1, 5 * frontend.patches.in_features).view(5, -1)
    clips = PatchBatch(values, torch.tensor([0, 1, 1, 0, 1]), torch.tensor([3, 2]))
    with _Trial(encoder, clips.to(next(encoder.parameters()).device), frontend) as trial:
        if trial.equals_alone(encoder.config.layout):
            return None
        problem = f"cannot read patches{trial.why}" if trial.why else "mixes the patches of a batch"
    return f"model type {encoder.model.config.model_type} {problem}; use another encoder"


def drops_by_key(
    encoder: Encoder,  # the encoder with its weights, in its layout; it is left unchanged
) -> bool:
    """True if dropout depends on the spans' keys alone; False if the encoder also draws from torch's generator."""
    with _Trial(encoder) as trial:
        return trial.repeats()


def _unequal(encoder: Encoder, what: str, why: str) -> str:
    return f"model type {encoder.model.config.model_type}: {what} of its batch, packed and padded alike{why}"


class _Trial:
    """Runs forwards of an encoder in eval mode over artificial spans, or clips; restores its settings afterwards."""

    def __init__(self, encoder: Encoder, clips: PatchBatch | None = None, frontend: Frontend | None = None) -> None:
        self.encoder = encoder
        self.frontend = frontend
        self.why = ""  # error of the last test, if it failed with one
        self.batch: AnyBatch = clips or _spans(encoder)
        self.alone: Tensor | None = None  # hidden states of every span by itself

    def __enter__(self) -> "_Trial":
        self.before = self.encoder.config, self.encoder.training
        self.encoder.eval()
        return self

    def __exit__(self, *_: Any) -> None:
        self.encoder.set_layout(self.before[0])
        self.encoder.train(self.before[1])
        self.encoder.keys.clear()  # those of the artificial spans

    def equals_alone(self, layout: Layout) -> bool:
        """True if the hidden states of all spans together equal those of each span alone."""

        def test() -> bool:
            if self.alone is None:
                spans = (self.batch.span_slice(i, i + 1) for i in range(self.batch.num_spans))
                self.alone = torch.cat([self._hidden(span, "padded") for span in spans])
            return _equal(self._hidden(self.batch, layout), self.alone)

        return self._passes(test)

    def is_broken(self) -> bool:
        """True if hidden states of single spans are not finite; call it after `equals_alone`."""
        return self.alone is not None and not bool(self.alone.isfinite().all())

    def trains(self, layout: Layout) -> bool:
        """True if a forward with dropout succeeds."""
        short = self.batch.span_slice(0, self.batch.num_spans - 1)  # without the long span, which takes the time
        self.encoder.train()
        passed = self._passes(lambda: bool(self._hidden(short, layout).isfinite().all()))
        self.encoder.eval()
        return passed

    def repeats(self) -> bool:
        """True if two forwards with dropout give the same bits whatever torch's generator holds."""
        self.encoder.train()
        hidden = [self._hidden(self.batch, self.before[0].layout, seed).view(torch.uint8) for seed in (0, 1)]
        self.encoder.eval()
        return torch.equal(*hidden)

    def head_is_whole(self) -> bool:
        """True if the head, applied to hidden states, gives the logits of the whole model."""
        span, model = _spans(self.encoder).span_slice(1, 2), self.encoder.model

        def test() -> bool:
            hidden = self._hidden(span, "padded")
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                ids = span.input_ids[None]
                logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
                return _equal(mlm_head(model)(hidden), logits)

        return self._passes(test)

    def _passes(self, test: Callable[[], bool]) -> bool:
        self.why = ""
        try:
            return test()
        except _CANNOT as error:
            self.why = f" ({(str(error).strip().splitlines() or [type(error).__name__])[0]})"
            return False

    def _hidden(self, batch: AnyBatch, layout: Layout, seed: int | None = None) -> Tensor:
        self.encoder.set_layout(self.encoder.config.model_copy(update={"layout": layout}))
        devices = [batch.device] if batch.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            if seed is not None:
                torch.manual_seed(seed)
            return self.encoder.hidden(batch, self.frontend)


def _equal(actual: Tensor, expected: Tensor) -> bool:
    if actual.shape != expected.shape or not bool(expected.isfinite().all()):
        return False
    return float((actual - expected).abs().max()) <= _TOLERANCE * float(expected.abs().max())


def _spans(encoder: Encoder) -> SpanBatch:
    """Spans of different lengths and tokens; one is longer than the window of local attention, if the model has one."""
    config = encoder.model.config
    windows = map(config.to_dict().get, ("sliding_window", "local_attention"))
    lengths = list(_LENGTHS)
    if window := max((window for window in windows if isinstance(window, int)), default=0):
        lengths[-1] = max(lengths[-1], min(window + 8, max_span_tokens(encoder.model), _MOST_TOKENS))
    special = {config.pad_token_id, None}  # padding would be masked
    allowed = [number for number in range(min(64, config.vocab_size)) if number not in special]
    ids = torch.tensor([allowed[place % len(allowed)] for place in range(sum(lengths))])
    nothing = torch.empty(0, dtype=torch.int64)
    keys = torch.arange(1, len(lengths) + 1, dtype=torch.int32)  # any, as long as they differ
    return SpanBatch(ids, torch.tensor(lengths), nothing, nothing, keys).to(next(encoder.parameters()).device)
