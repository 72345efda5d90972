"""The step of SimCSE, SCD and SCL against the released padded layout, for `benchmarks.step --objective`."""

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import record
from benchmarks.step.padded_texts import LOSSES, PaddedTexts, ReleasedTextStep, alternate_dropout, pad_texts
from benchmarks.step.sides import Side, compare, equality
from benchmarks.workload import models, packed
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.model.compilation import compile_layers
from declutr.trainer.objectives.scd.config import ScdConfig

_NOTHING = (0.0, 0.0)
_COMPARED = 8  # most rows of the batch whose gradients are compared, because float64 is slow


@dataclass(frozen=True)
class TextSetting(packed.TextWorkload):
    """Settings shared by both sides of a comparison."""

    compile: bool = False

    def batches(self, count: int, rows: int) -> list[RankBatch]:
        """Make batches of `count` steps, on the CPU."""
        on_cpu = dataclasses.replace(self, device=torch.device("cpu"))
        return [on_cpu.batch(step * rows, rows) for step in range(count)]

    def without_dropout(self) -> "TextSetting":
        """The same setting in float32 without dropout, also of SCD, whose settings refuse it."""
        objective = self.objective
        if isinstance(objective, ScdConfig):
            objective = objective.model_copy(update={"dropout_rates": _NOTHING, "attention_dropout_rates": _NOTHING})
        plain = {"dropout": 0.0, "attention_dropout": 0.0, "autocast": None, "compile": False}
        return dataclasses.replace(self, objective=objective, **plain)  # type: ignore[arg-type]

    def with_attention_dropout(self, wanted: bool) -> "TextSetting":
        """The setting with or without dropout of attention weights, at the rate of the hidden states."""
        objective = self.objective
        if isinstance(objective, ScdConfig):
            objective = objective.model_copy(
                update={"attention_dropout_rates": objective.dropout_rates if wanted else _NOTHING}
            )
        return dataclasses.replace(self, objective=objective, attention_dropout=self.dropout if wanted else 0.0)

    def ours(self) -> Side:
        """Build the side of the trainer's step."""
        encoder = self.encoder()
        if self.compile:
            compile_layers(encoder.model.base_model)
        made = self.train_step(encoder)

        def gradients(batch: RankBatch) -> Tensor:
            [found] = made.gradients({"": batch}, 1)
            return torch.stack(list(found.terms.values())).sum()

        def places(batch: RankBatch) -> int:
            return encoder.token_places(batch.spans)

        both = nn.ModuleDict({"encoder": encoder.model, "objective": made.tasks[0].objective})
        return Side("ours", both, lambda batch: batch.to(self.device), gradients, places)

    def released(self) -> Side:
        """Build the side of the released layout, with the same weights."""
        model = models.padded_model(self.size, self.dropout, self.seed, self.attention_dropout).to(self.device)
        if isinstance(self.objective, ScdConfig):
            alternate_dropout(
                model,
                self.objective.dropout_rates,
                self.objective.attention_dropout_rates or self.objective.dropout_rates,
            )
        if self.compile:
            model.base_model.compile(dynamic=True)
        size = int(model.config.hidden_size)
        loss = LOSSES[type(self.objective)](self.objective, size).to(self.device)
        loss.load_state_dict(self.loss(size).state_dict())
        step = ReleasedTextStep(model, loss, loss, self.autocast)
        both = nn.ModuleDict({"encoder": model, "objective": loss})
        return Side("released", both, self.padded, step.gradients, lambda batch: self.padded(batch).num_places)

    def padded(self, batch: RankBatch) -> PaddedTexts:
        """The batch in the released layout."""
        return pad_texts(batch, 1, self.device)


def other_sentences(batch: RankBatch) -> RankBatch:
    """The batch with the second view of each sentence replaced by that of the next sentence.

    Without dropout the views of a sentence are equal, and the gradient of their cosine vanishes.
    """
    if batch.facts:
        return batch
    spans = batch.tokens
    order = torch.arange(spans.num_spans).view(-1, 2)
    order[:, 1] = order[:, 1].roll(-1)
    places = order.flatten()
    pieces = spans.input_ids.split(spans.lengths.tolist())
    changed = dataclasses.replace(
        spans,
        input_ids=torch.cat([pieces[place] for place in places.tolist()]),
        lengths=spans.lengths[places],
        keys=None if spans.keys is None else spans.keys[places],
    )
    return dataclasses.replace(batch, spans=changed)


def measure(given: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Figures of one objective: equality, times without and with dropout of attention weights."""
    objective = packed.OBJECTIVES[given.objective]
    if isinstance(objective, ScdConfig) and given.projector:
        objective = objective.model_copy(update={"projector": given.projector})
    rows = given.documents or packed.ROWS[given.objective]
    device = torch.device(given.device)
    setting = TextSetting.of(
        given,
        given.device,
        given.precision,
        objective=objective,
        dropout=given.dropout,
        pooling="mean" if given.objective == "scl" else "cls",
        compile=given.compile,
    ).with_attention_dropout(False)
    batches = setting.batches(given.warm_up + steps, rows)
    found = _equality(setting.without_dropout(), min(rows, _COMPARED))
    parts = {}
    for wanted in (False, True):
        record.progress(f"{given.objective}, attention dropout {'on' if wanted else 'off'}")
        timed = setting.with_attention_dropout(wanted)
        parts[wanted] = compare(timed.ours(), timed.released(), batches, given.warm_up, device)
    kept = batches[given.warm_up :]
    padded = [setting.padded(batch) for batch in kept]
    real = [batch.spans.num_tokens for batch in kept]
    rates = objective.dropout_rates if isinstance(objective, ScdConfig) else (given.dropout,) * 2
    return {
        "documents": rows,
        "dropout": list(rates),
        "max_tokens": objective.max_tokens,
        **parts[False],
        "with_attention_dropout": parts[True],
        **found,
        "padding_share": 0.0,
        "padding_share_released": 1 - sum(each.num_tokens for each in padded) / sum(each.num_places for each in padded),
        "tokens_real": real,
        "token_places_released": [each.num_places for each in padded],
        "tokens_per_second": sum(real) / sum(parts[False]["times"]["ours"]),
    }


def _equality(plain: TextSetting, rows: int) -> dict[str, float]:
    """Differences of loss and gradient without dropout, in float32 and float64."""
    batch = other_sentences(plain.batches(1, rows)[0])  # made here, because SCD's spans carry their rates
    sides = plain.ours(), plain.released()
    loss_diff, grad_diff = equality(*sides, batch, plain.device)
    for side in sides:
        side.model.double()
    _, exact_diff = equality(*sides, batch, plain.device)
    record.progress(f"loss differs by {loss_diff:.2e}, gradients by {grad_diff:.2e}; in float64 by {exact_diff:.2e}")
    return {"loss_abs_diff": loss_diff, "grad_rel_diff": grad_diff, "grad_rel_diff_float64": exact_diff}
