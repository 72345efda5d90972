"""Time of one step: the released layout against ours, and sentence-transformers against ours.

    python -m benchmarks.step --json OUT [--model distilroberta] [--documents 4] [--steps N]
    python -m benchmarks.step --objective simcse|scd|scl|supcon --json OUT

A step is the forward pass, the loss and the backward pass. The optimizer, equal on all sides, is left out. All sides
have the same weights and read the same spans with the same masks. They take turns within one run, so that other
programs on the machine affect all of them. Losses and gradients are always compared in float32 without dropout.

DeCLUTR is timed without dropout unless --dropout is set. The other objectives are timed twice with the dropout of their
papers, without and with dropout of attention weights, on made-up texts with the lengths of Wikipedia's sentences or of
SNLI's pairs. SupCon is timed on images of 224 x 224 pixels and, under `audio`, on sounds of 0.3 to 10.24 s.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.step import clip_step, text_step
from benchmarks.step.padded import NeighbourStep, PaddedBatch, ReleasedStep, pad_batch
from benchmarks.step.sides import Side, compare, equality
from benchmarks.workload import models, packed
from declutr.trainer.data.batches import RankBatch, SpanBatch
from declutr.trainer.model.compilation import compile_layers
from declutr.trainer.model.flops import gpu_name, linear_weights, peak_flops, step_flops
from declutr.trainer.objectives.declutr.config import DeclutrConfig

TEMPERATURE = 0.05


@dataclass(frozen=True)
class Setting(packed.Workload):
    """Settings shared by all sides of a comparison."""

    objective: DeclutrConfig = field(default_factory=DeclutrConfig)
    documents: int = 4
    compile: bool = False

    def batches(self, count: int) -> Iterator[SpanBatch]:
        """Make span batches of `count` steps, on the CPU."""
        on_cpu = dataclasses.replace(self, device=torch.device("cpu"))
        for step in range(count):
            yield on_cpu.batch(step * self.documents, self.documents).tokens

    def ours(self) -> Side:
        """Build the side of the trainer's step."""
        encoder = self.encoder()
        if self.compile:
            compile_layers(encoder.model.base_model)
        made = self.train_step(encoder)

        def prepare(spans: SpanBatch) -> RankBatch:
            contrasted = self.documents * self.spans.num_anchors if self.objective.contrastive else 0
            return RankBatch(spans.to(self.device), self.documents, contrasted)

        def gradients(batch: RankBatch) -> Tensor:
            [found] = made.gradients({"": batch}, 1)
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
    given = _options().parse_args(arguments)
    given.spans = given.spans or [32, 512]
    steps = given.steps or (30 if given.device == "cuda" else 5)
    if given.objective != "declutr":
        given.dropout = 0.1 if given.dropout is None else given.dropout
        measure = clip_step.measure if given.objective == "supcon" else text_step.measure
        found = measure(given, steps)
    else:
        found = _declutr(given, steps)
    figures = {
        "benchmark": "step",
        "objective": given.objective,
        "model": given.model,
        "device": given.device,
        "precision": "bf16" if record.autocast_type(given.precision, given.device) else "fp32",
        "compile": given.compile,
        **found,
        **record.facts("step", given.commit),
    }
    record.publish(figures, given.json)


def _options() -> argparse.ArgumentParser:
    options = record.parser("step", __doc__)
    record.add_device(options)
    options.add_argument("--objective", choices=("declutr", *packed.OBJECTIVES, "supcon"), default="declutr")
    options.add_argument("--model", choices=models.SIZES, default="distilroberta")
    rows = "rows per step; default: 4, the released batch of a GPU, for declutr; 64 for simcse and scd, 21 premises "
    options.add_argument("--documents", type=int, help=f"{rows}with three pairs each for scl, 8 for supcon")
    options.add_argument("--steps", type=int, help="timed steps; default: 5 on cpu, 30 on cuda")
    options.add_argument("--warm-up", type=int, default=2, help="untimed steps before the timed ones")
    options.add_argument(
        "--dropout",
        type=float,
        help="dropout of all sides in timed steps; default: 0 for declutr, 0.1 for the others, for scd the two "
        "rates of its paper",
    )
    options.add_argument("--projector", type=int, nargs="+", help="widths of scd's projector; default: 4096 4096 4096")
    options.add_argument("--compile", action="store_true", help="torch.compile all sides, with dynamic shapes")
    return options


def _declutr(given: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Figures of DeCLUTR's step."""
    objective = DeclutrConfig(loss={"kind": "ntxent", "temperature": TEMPERATURE})
    settings = {"documents": given.documents or 4, "compile": given.compile, "dropout": given.dropout or 0.0}
    setting = Setting.of(given, given.device, given.precision, objective=objective, **settings)
    found = against_released(setting, steps, given.warm_up)
    other = against_sentence_transformers(setting, steps, given.warm_up)
    return {
        "spans": given.spans,
        **{name: settings[name] for name in ("documents", "dropout")},
        **found,
        "ratio_vs_sentence_transformers": other["ratio_median"],
        "sentence_transformers": other,
    }


if __name__ == "__main__":
    main()
