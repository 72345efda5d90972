"""The layout that an encoder computes correctly: tried on a few made-up spans, before it is trained or embeds texts.

The reference is every span alone: nothing can leak into it, and there is no padding. Families differ in ways that no
flag tells: some ignore the packed layout and attend to the whole row, some let padding through.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.data.batches import SpanBatch
from trainer.model.encoder import Encoder
from trainer.model.language_model import FAMILIES, UnfitEncoderError, max_span_tokens, mlm_head

Layout = Literal["packed", "padded"]
# Of the largest entry. Of 30 untrained families none rounded by more than 3e-6, and the smallest leak was 5e-4.
_TOLERANCE = 2e-5
_LENGTHS = [3, 7, 5, 7]
_MOST_TOKENS = 512  # of the span that is longer than a local attention's window
# What the code of any family may raise where it cannot do what it is asked.
_CANNOT = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError)


def embedding_layout(encoder: Encoder) -> Layout:
    """The layout in which an encoder that is not trained gives every text what it gives it alone: packed, else padded.

    Args:
        encoder: with its weights; it is left as it was.

    Broken weights show nothing of a layout; padded is taken then, and the embeddings show that they are not finite.

    Raises:
        UnfitEncoderError: neither layout does.
    """
    with _Trial(encoder) as trial:
        if trial.equals_alone("packed"):
            return "packed"
        if trial.equals_alone("padded") or trial.is_broken():
            return "padded"
        raise UnfitEncoderError(_unequal(encoder, "a text's embedding changes with the other texts", trial.why))


def fitting_layout(encoder: Encoder, mlm: bool) -> Layout:
    """The layout that an encoder is trained in: the configuration's where it is packed and proved, else padded.

    Args:
        encoder: with the weights it begins with; it is left as it was.
        mlm: whether its MLM head is trained.

    Raises:
        UnfitEncoderError: the padded layout is not correct either, or the MLM head is not.
    """
    kind, wanted = encoder.model.config.model_type, encoder.config.layout
    advice = f"take another encoder, for example of type {', '.join(FAMILIES[:5])}"
    with _Trial(encoder) as trial:
        if mlm and not trial.head_is_whole():
            raise UnfitEncoderError(
                f"model type {kind}: the loss of its MLM head cannot be computed here{trial.why}; train it without one "
                f"(objective.terms=contrastive), or {advice}"
            )
        if wanted == "packed" and trial.equals_alone("packed") and trial.trains("packed"):
            return "packed"
        if not trial.equals_alone("padded"):
            problem = _unequal(encoder, "a span's embedding changes with the other spans", trial.why)
            raise UnfitEncoderError(f"{problem}; {advice}")
        if not trial.trains("padded"):
            raise UnfitEncoderError(f"model type {kind}: its forward fails in training{trial.why}; {advice}")
        return "padded"


def _unequal(encoder: Encoder, what: str, why: str) -> str:
    return f"model type {encoder.model.config.model_type}: {what} of its batch, packed and padded alike{why}"


class _Trial:
    """Forwards of an encoder in eval mode without a trace; afterwards it is as it was."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.why = ""  # the last test failed, where it was an error
        self.batch = _spans(encoder)
        self.alone: Tensor | None = None  # hidden states of every span by itself

    def __enter__(self) -> "_Trial":
        self.before = self.encoder.config, self.encoder.training
        self.encoder.eval()
        return self

    def __exit__(self, *_: Any) -> None:
        self.encoder.set_layout(self.before[0])
        self.encoder.train(self.before[1])
        self.encoder.keys.tokens = None

    def equals_alone(self, layout: Layout) -> bool:
        """Are the hidden states of all spans together those of every span alone?"""

        def test() -> bool:
            if self.alone is None:
                spans = (self.batch.span_slice(i, i + 1) for i in range(self.batch.num_spans))
                self.alone = torch.cat([self._hidden(span, "padded") for span in spans])
            return _equal(self._hidden(self.batch, layout), self.alone)

        return self._passes(test)

    def is_broken(self) -> bool:
        """Whether hidden states are not finite even where every span is alone; asked after `equals_alone`."""
        return self.alone is not None and not bool(self.alone.isfinite().all())

    def trains(self, layout: Layout) -> bool:
        """Does a forward with dropout go through?"""
        short = self.batch.span_slice(0, self.batch.num_spans - 1)
        self.encoder.train()
        passed = self._passes(lambda: bool(self._hidden(short, layout).isfinite().all()))
        self.encoder.eval()
        return passed

    def head_is_whole(self) -> bool:
        """Does the head, on hidden states, give the logits of the whole model?"""
        span, model = self.batch.span_slice(1, 2), self.encoder.model

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

    def _hidden(self, batch: SpanBatch, layout: Layout) -> Tensor:
        self.encoder.set_layout(self.encoder.config.model_copy(update={"layout": layout}))
        devices = [batch.input_ids.device] if batch.input_ids.is_cuda else []
        with (
            torch.random.fork_rng(devices=devices),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            return self.encoder.hidden(batch)


def _equal(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or not bool(expected.isfinite().all()):
        return False
    return float((found - expected).abs().max()) <= _TOLERANCE * float(expected.abs().max())


def _spans(encoder: Encoder) -> SpanBatch:
    """Spans of different lengths and tokens, one of them longer than the window of local attention, if there is any."""
    config = encoder.model.config
    windows = map(config.to_dict().get, ("sliding_window", "local_attention"))
    lengths = list(_LENGTHS)
    if window := max((window for window in windows if isinstance(window, int)), default=0):
        lengths[-1] = max(lengths[-1], min(window + 8, max_span_tokens(encoder.model), _MOST_TOKENS))
    special = {config.pad_token_id, None}
    allowed = [number for number in range(min(64, config.vocab_size)) if number not in special]
    ids = torch.tensor([allowed[place % len(allowed)] for place in range(sum(lengths))])
    nothing = torch.empty(0, dtype=torch.int64)
    keys = torch.arange(1, len(lengths) + 1, dtype=torch.int32)
    return SpanBatch(ids, torch.tensor(lengths), nothing, nothing, keys).to(next(encoder.parameters()).device)
