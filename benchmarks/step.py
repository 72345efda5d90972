"""Time of one step: the released layout against ours, and sentence-transformers against ours.

    python -m benchmarks.step --json OUT [--model distilroberta] [--documents 4] [--steps N]

A step is the forward pass, the loss and the backward pass. The optimizer, equal on all sides, is left out. All sides
have the same weights and read the same spans with the same masks. They take turns within one run, so that other
programs on the machine affect all of them. Dropout is off unless --dropout is set; losses and gradients are always
compared in float32 without it.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models, packed, record
from benchmarks.neighbour import NeighbourStep
from benchmarks.released import PaddedBatch, ReleasedStep, pad_batch
from trainer.data.batches import RankBatch, SpanBatch
from trainer.model.flops import gpu_name, linear_weights, peak_flops, step_flops
from trainer.objectives.declutr.config import DeclutrConfig

TEMPERATURE = 0.05


@dataclass(frozen=True)
class Side:
    """One side of the comparison.

    Attributes:
        name: name in the figures.
        model: model whose gradients it computes.
        prepare: lays out a batch; not timed.
        gradients: computes loss and gradient of a laid-out batch.
        places: token places that its forward passes compute, including padding.
    """

    name: str
    model: nn.Module
    prepare: Callable[[SpanBatch], Any]
    gradients: Callable[[Any], Tensor]
    places: Callable[[SpanBatch], int]


@dataclass(frozen=True)
class Setting(packed.Workload):
    """Settings shared by all sides of a comparison."""

    documents: int = 4
    compile: bool = False

    def batches(self, count: int) -> Iterator[SpanBatch]:
        """Make span batches of `count` steps, on the CPU."""
        on_cpu = dataclasses.replace(self, device=torch.device("cpu"))
        for step in range(count):
            yield on_cpu.batch(step * self.documents, self.documents).spans

    def ours(self) -> Side:
        """Build the side of the trainer's step."""
        encoder = self.encoder()
        if self.compile:
            encoder.model.base_model.compile(dynamic=True)
        made = self.stepper(encoder)

        def prepare(spans: SpanBatch) -> RankBatch:
            contrasted = self.documents * self.spans.num_anchors if self.objective.contrastive else 0
            return RankBatch(spans.to(self.device), self.documents, contrasted)

        def gradients(batch: RankBatch) -> Tensor:
            found = made.gradients(batch, 1)
            return found.terms.get("contrastive", 0.0) + found.mlm_sum / max(1, found.num_selected)

        return Side("ours", encoder.model, prepare, gradients, encoder.token_places)

    def padded(self, name: str) -> Side:
        """Build a side that pads: `released` or `sentence_transformers`.

        Raises:
            ImportError: sentence-transformers is not installed.
        """
        model = models.padded_model(self.size, self.dropout, self.seed).to(self.device)
        if self.compile:
            model.base_model.compile(dynamic=True)
        num_anchors = self.documents * self.spans.num_anchors
        pad_id = int(model.config.pad_token_id)

        def prepare(spans: SpanBatch) -> PaddedBatch:
            return pad_batch(spans, num_anchors, pad_id, self.device)

        def places(spans: SpanBatch) -> int:
            return prepare(spans).num_places

        if name == "released":
            released = ReleasedStep(model, self.spans.num_positives, TEMPERATURE, self.autocast)
            return Side(name, model, prepare, released.gradients, places)
        return Side(name, model, prepare, NeighbourStep(model, TEMPERATURE, self.autocast).gradients, places)


def run(side: Side, batch: SpanBatch, device: torch.device) -> tuple[float, float]:
    """Run one step; return seconds and loss. The gradient stays in the side's model."""
    side.model.zero_grad(set_to_none=True)
    prepared = side.prepare(batch)
    _finish(device)
    begun = time.perf_counter()
    loss = side.gradients(prepared)
    _finish(device)
    return time.perf_counter() - begun, float(loss)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def equality(ours: Side, other: Side, batch: SpanBatch, device: torch.device) -> tuple[float, float]:
    """Difference of the losses, and the largest difference of a gradient's entries over the largest entry."""
    loss_diff = abs(run(ours, batch, device)[1] - run(other, batch, device)[1])
    theirs = dict(other.model.named_parameters())
    diffs, largest = [0.0], [1e-30]
    for name, parameter in ours.model.named_parameters():
        expected = theirs[name].grad
        if parameter.grad is None or expected is None:
            continue
        diffs.append(float((parameter.grad - expected).abs().max()))
        largest.append(float(expected.abs().max()))
    return loss_diff, max(diffs) / max(largest)


def compare(ours: Side, other: Side, batches: list[SpanBatch], warm_up: int, device: torch.device) -> dict[str, Any]:
    """Measure the steps of both sides in turns; return seconds and ratios."""
    seconds: dict[str, list[float]] = {other.name: [], ours.name: []}
    for number, batch in enumerate(batches):
        for side in (other, ours):
            taken, _ = run(side, batch, device)
            if number >= warm_up:
                seconds[side.name].append(round(taken, 6))
            record.progress(f"{'warm-up' if number < warm_up else 'step'} {number} {side.name} {taken:.3f} s")
    return {"times": seconds, **record.ratios(seconds[other.name], seconds[ours.name])}


def against_released(setting: Setting, steps: int, warm_up: int) -> dict[str, Any]:
    """Compare the released layout, with MLM and contrastive loss, with the trainer's step."""
    batches = list(setting.batches(warm_up + steps))
    # Equality is checked without half precision and dropout: under autocast both sides round in different orders. Fresh
    # weights give nearly equal embeddings, for which float32 loses digits on both sides; float64 distinguishes them.
    plain = dataclasses.replace(setting, autocast=None, dropout=0.0, compile=False)
    loss_diff, grad_diff = equality(plain.ours(), plain.padded("released"), batches[0], setting.device)
    one = dataclasses.replace(plain, documents=1)
    exact = one.ours(), one.padded("released")
    for side in exact:
        side.model.double()
    _, exact_diff = equality(*exact, next(one.batches(1)), setting.device)
    record.progress(f"loss differs by {loss_diff:.2e}, gradients by {grad_diff:.2e}; in float64 by {exact_diff:.2e}")
    del exact
    ours, released = setting.ours(), setting.padded("released")
    measured = compare(ours, released, batches, warm_up, setting.device)
    timed = batches[warm_up:]
    places = list(map(released.places, timed))
    real = [batch.num_tokens for batch in timed]
    seconds = sum(measured["times"]["ours"])
    weights = linear_weights(ours.model)
    flops = sum(step_flops(ours.model, weights, batch.lengths, len(batch.labels)) for batch in timed)
    peak = peak_flops(gpu_name(setting.device), half=True)
    return measured | {
        "loss_abs_diff": loss_diff,
        "grad_rel_diff": grad_diff,
        "grad_rel_diff_float64": exact_diff,
        "padding_share": 1 - sum(real) / sum(map(ours.places, timed)),
        "padding_share_released": 1 - sum(real) / sum(places),
        "tokens_real": real,
        "token_places_released": places,
        "tokens_per_second": sum(real) / seconds,
        "tokens_per_second_released": sum(real) / sum(measured["times"]["released"]),
        "teraflops_per_second": flops / seconds / 1e12,
        "mfu": flops / seconds / peak if peak and setting.autocast else None,
    }


def against_sentence_transformers(setting: Setting, steps: int, warm_up: int) -> dict[str, Any]:
    """Compare its cached contrastive loss with our contrastive step: no MLM, one positive per anchor, no masks."""
    spans = setting.spans.model_copy(update={"num_positives": 1})
    setting = dataclasses.replace(setting, spans=spans, objective=DeclutrConfig(terms="contrastive"))
    try:
        theirs = setting.padded("sentence_transformers")
    except ImportError as error:
        return {"ratio_median": None, "reason": f"not importable: {error}"}
    return compare(setting.ours(), theirs, list(setting.batches(warm_up + steps)), warm_up, setting.device)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    options = record.parser("step", __doc__)
    record.add_device(options)
    options.add_argument("--model", choices=models.SIZES, default="distilroberta")
    options.add_argument(
        "--documents", type=int, default=4, help="documents per step; 4 is the released batch of a GPU"
    )
    options.add_argument("--steps", type=int, help="timed steps; default: 5 on cpu, 30 on cuda")
    options.add_argument("--warm-up", type=int, default=2, help="untimed steps before the timed ones")
    options.add_argument("--dropout", type=float, default=0.0, help="dropout of all sides in timed steps")
    options.add_argument("--compile", action="store_true", help="torch.compile all sides, with dynamic shapes")
    given = options.parse_args(arguments)
    given.spans = given.spans or [32, 512]
    objective = DeclutrConfig(loss={"kind": "ntxent", "temperature": TEMPERATURE})
    settings = {"documents": given.documents, "compile": given.compile, "dropout": given.dropout}
    setting = Setting.of(given, given.device, given.precision, objective=objective, **settings)
    steps = given.steps or (30 if given.device == "cuda" else 5)
    found = against_released(setting, steps, given.warm_up)
    other = against_sentence_transformers(setting, steps, given.warm_up)
    figures = {
        "benchmark": "step",
        "model": given.model,
        "device": given.device,
        "precision": "bf16" if setting.autocast else "fp32",
        "compile": given.compile,
        "documents": given.documents,
        "spans": given.spans,
        "dropout": given.dropout,
        **found,
        "ratio_vs_sentence_transformers": other["ratio_median"],
        "sentence_transformers": other,
        **record.facts("step", given.commit),
    }
    record.publish(figures, given.json)


if __name__ == "__main__":
    main()
