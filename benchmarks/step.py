"""Time of one step: the released layout against ours, and sentence-transformers against ours.

    python -m benchmarks.step --json OUT [--model distilroberta] [--documents 4] [--steps N]

A step is the forward pass, the loss and the backward pass. The optimizer, equal on all sides, is left out. All sides
have the same weights and read the same spans with the same masks. They take turns within one run, so that other
programs on the machine affect all of them. Losses and gradients are always compared in float32 without dropout; steps
are timed without dropout unless --dropout is set.

benchmarks/README.md describes the released layout. MLM's cross entropy is the model's own, with -100 for unselected
tokens; pooling is the mean over a span's tokens, special ones included; positives are averaged after pooling.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pytorch_metric_learning.losses import NTXentLoss
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks import record, workload
from declutr.trainer.data.batches import RankBatch, SpanBatch, as_rows, padding_mask
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.step.task import gpu_name, peak_flops, step_flops

TEMPERATURE = 0.05
_IGNORED = -100  # transformers ignores this label
_DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")  # together the pairs of NT-Xent
_MINI_BATCH = 32  # the default of sentence-transformers


PaddedSpans = dict[str, Tensor]  # spans of one kind, `(S, longest)`: `input_ids`, `attention_mask`, `labels`
PaddedBatch = tuple[PaddedSpans, PaddedSpans]  # A step's anchors and positives, each kind padded to its longest span


def _pad(batch: SpanBatch, pad_id: int, device: torch.device) -> PaddedSpans:
    ids, mask = as_rows(batch.input_ids, batch, pad_id), padding_mask(batch)
    flat = torch.full_like(batch.input_ids, _IGNORED)
    flat[batch.selected] = batch.labels
    labels = torch.full_like(ids, _IGNORED)
    labels[mask] = flat
    return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device), "labels": labels.to(device)}


def _inputs(spans: PaddedSpans) -> PaddedSpans:
    """The spans without labels."""
    return {name: spans[name] for name in ("input_ids", "attention_mask")}


def released_loss(model: PreTrainedModel, num_positives: int) -> Callable[[PaddedBatch], Tensor]:
    """The loss of a step in the released layout, contrastive + MLM, by a model with transformers' attention."""

    def embed(spans: PaddedSpans) -> tuple[Tensor, Tensor | None]:
        """Mean of each span's last hidden states, and the MLM loss of labels."""
        output = model(**spans, output_hidden_states=True)
        hidden, mask = output.hidden_states[-1], spans["attention_mask"][..., None]
        return (hidden * mask).sum(dim=1) / mask.sum(dim=1), output.loss

    def loss(batch: PaddedBatch) -> Tensor:
        anchors, mlm = embed(batch[0])
        positives, _ = embed(_inputs(batch[1]))  # no labels: only anchors are masked
        averaged = positives.view(len(anchors), num_positives, -1).mean(dim=1)
        # an anchor and its positives are one class
        labels = torch.arange(len(anchors), device=anchors.device).repeat(2)
        embeddings = torch.cat([anchors, averaged])
        if embeddings.dtype != torch.float64:  # the loss needs at least float32
            embeddings = embeddings.float()
        with torch.autocast(anchors.device.type, enabled=False):
            contrastive: Tensor = NTXentLoss(temperature=TEMPERATURE)(embeddings, labels)
        assert mlm is not None
        return contrastive + mlm

    return loss


class _Hidden(nn.Module):
    """Token embeddings in the form that sentence-transformers' pooling reads."""

    def __init__(self, model: PreTrainedModel, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.autocast = model.base_model, autocast

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        # Here, because the loss encodes again in its backward, which runs outside of the caller's autocast.
        with torch.autocast(self.model.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            output = self.model(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        return features | {"token_embeddings": output.last_hidden_state}


def neighbours_loss(model: PreTrainedModel, autocast: torch.dtype | None) -> Callable[[PaddedBatch], Tensor]:
    """The loss of a contrastive step by sentence-transformers' CachedMultipleNegativesRankingLoss.

    Its trainer pads like the released collation. The loss encodes each side once without and once with a graph,
    whatever the size of the batch. Nothing is masked, because it has no MLM loss.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
    from sentence_transformers.models import Pooling

    whole = SentenceTransformer(
        modules=[_Hidden(model, autocast), Pooling(int(model.config.hidden_size))], device=str(model.device)
    )
    loss = CachedMultipleNegativesRankingLoss(
        whole, scale=1 / TEMPERATURE, mini_batch_size=_MINI_BATCH, directions=_DIRECTIONS
    )

    def of(batch: PaddedBatch) -> Tensor:
        return loss([_inputs(spans) for spans in batch], torch.empty(0, device=model.device))

    return of


@dataclass(frozen=True)
class Side:
    """One side of the comparison."""

    name: str  # name in the figures
    model: nn.Module  # model whose gradients it computes
    prepare: Callable[[Any], Any]  # lays out a batch; not timed
    gradients: Callable[[Any], Tensor]  # computes loss and gradient of a laid-out batch
    places: Callable[[Any], int]  # token places that its forward passes compute, including padding


def run(side: Side, batch: Any, device: torch.device) -> tuple[float, float]:
    """Run one step; return seconds and loss. The gradient stays in the side's model."""
    side.model.zero_grad(set_to_none=True)
    prepared = side.prepare(batch)  # not timed, in favour of the released layout, which pads
    begun = record.finish(device)
    loss = side.gradients(prepared)
    return record.finish(device) - begun, float(loss)


def run_queued(side: Side, batches: Sequence[Any], device: torch.device) -> float:
    """Mean seconds of a step where nothing waits between steps, as in training."""
    prepared = [side.prepare(batch) for batch in batches]
    begun = record.finish(device)
    for batch in prepared:
        side.model.zero_grad(set_to_none=True)
        side.gradients(batch)
    return (record.finish(device) - begun) / len(prepared)


def equality(own: Side, other: Side, batch: Any, device: torch.device) -> tuple[float, float]:
    """Difference of the losses, and the largest difference of a gradient's entries over the largest entry."""
    loss_diff = abs(run(own, batch, device)[1] - run(other, batch, device)[1])
    other_parameters = dict(other.model.named_parameters())
    diffs, largest = [0.0], [1e-30]  # no division by 0
    for name, parameter in own.model.named_parameters():
        expected = other_parameters[name].grad
        if parameter.grad is None or expected is None:
            continue
        diffs.append(float((parameter.grad - expected).abs().max()))
        largest.append(float(expected.abs().max()))
    return loss_diff, max(diffs) / max(largest)


def compare(own: Side, other: Side, batches: Sequence[Any], warm_up: int, device: torch.device) -> dict[str, Any]:
    """Measure the steps of both sides in turns; return seconds and ratios."""
    seconds: dict[str, list[float]] = {other.name: [], own.name: []}
    for number, batch in enumerate(batches):
        for side in (other, own):  # in turns, so that other programs slow both
            elapsed, _ = run(side, batch, device)
            if number >= warm_up:
                seconds[side.name].append(round(elapsed, 6))
            record.progress(f"{'warm-up' if number < warm_up else 'step'} {number} {side.name} {elapsed:.3f} s")
    return {"times": seconds, **record.ratios(seconds[other.name], seconds[own.name])}


@dataclass(frozen=True)
class Setting(workload.Workload):
    """Settings shared by all sides of a comparison."""

    objective: DeclutrConfig = field(default_factory=DeclutrConfig)
    documents: int = 4
    compile: bool = False

    def batches(self, count: int) -> Iterator[SpanBatch]:
        """Make span batches of `count` steps, on the CPU."""
        on_cpu = dataclasses.replace(self, device=torch.device("cpu"))
        for step in range(count):
            spans = on_cpu.batch(step * self.documents, self.documents).spans
            assert isinstance(spans, SpanBatch)
            yield spans

    def trainer_side(self) -> Side:
        """Build the side of the trainer's step."""
        encoder = self.encoder(self.compile)
        train_step = self.train_step(encoder)

        def prepare(spans: SpanBatch) -> RankBatch:
            contrasted = self.documents * self.spans.num_anchors if self.objective.embeds else 0
            return RankBatch(spans.to(self.device), contrasted)

        def gradients(batch: RankBatch) -> Tensor:
            [sums] = train_step.gradients({"": batch}, 1)
            return sums.terms.get("contrastive", 0.0) + sums.mlm_sum / max(1, sums.num_selected)

        return Side("ours", encoder.model, prepare, gradients, encoder.token_places)

    def padded(self, name: str) -> Side:
        """Build a side that pads: `released` or `sentence_transformers`."""
        model = self.padded_model()
        if self.compile:
            model.base_model.compile(dynamic=True)  # else each length would compile anew
        num_anchors = self.documents * self.spans.num_anchors
        pad_id = int(model.config.pad_token_id)
        loss_of = (
            released_loss(model, self.spans.num_positives)
            if name == "released"
            else neighbours_loss(model, self.autocast)
        )

        def prepare(spans: SpanBatch) -> PaddedBatch:
            # Like the released collation; the batch is on the CPU, with its anchors first.
            anchors, positives = spans.span_slice(0, num_anchors), spans.span_slice(num_anchors, spans.num_spans)
            return _pad(anchors, pad_id, self.device), _pad(positives, pad_id, self.device)

        def places(spans: SpanBatch) -> int:
            return sum(part["input_ids"].numel() for part in prepare(spans))

        def gradients(batch: PaddedBatch) -> Tensor:
            with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                loss = loss_of(batch)
            loss.backward()
            return loss.detach()

        return Side(name, model, prepare, gradients, places)


def against_released(setting: Setting, steps: int, warm_up: int) -> dict[str, Any]:
    """Compare the released layout, with MLM and contrastive loss, with the trainer's step."""
    batches = list(setting.batches(warm_up + steps))
    # Equality is checked without half precision and dropout: under autocast both sides round in different orders. Fresh
    # weights give nearly equal embeddings, for which float32 loses digits on both sides; float64 distinguishes them.
    plain = dataclasses.replace(setting, autocast=None, dropout=0.0, compile=False)
    loss_diff, grad_diff = equality(plain.trainer_side(), plain.padded("released"), batches[0], setting.device)
    single = dataclasses.replace(plain, documents=1)
    exact = single.trainer_side(), single.padded("released")
    for side in exact:
        side.model.double()
    _, exact_diff = equality(*exact, next(single.batches(1)), setting.device)
    record.progress(f"loss differs by {loss_diff:.2e}, gradients by {grad_diff:.2e}; in float64 by {exact_diff:.2e}")
    del exact
    own, released = setting.trainer_side(), setting.padded("released")
    measured = compare(own, released, batches, warm_up, setting.device)
    timed = batches[warm_up:]
    places = list(map(released.places, timed))
    real = [batch.num_tokens for batch in timed]
    on_gpu = setting.device.type == "cuda"  # a CPU has no queue
    queued = {side.name: run_queued(side, timed, setting.device) for side in (released, own)} if on_gpu else None
    seconds = sum(measured["times"]["ours"])
    flops = sum(step_flops(own.model, batch.lengths, len(batch.labels)) for batch in timed)
    peak = peak_flops(gpu_name(setting.device), half=True)
    return measured | {
        "loss_abs_diff": loss_diff,
        "grad_rel_diff": grad_diff,
        "grad_rel_diff_float64": exact_diff,
        "padding_share": 1 - sum(real) / sum(map(own.places, timed)),
        "padding_share_released": 1 - sum(real) / sum(places),
        "tokens_real": real,
        "token_places_released": places,
        "queued_seconds": queued,
        "tokens_per_second": sum(real) / seconds,
        "tokens_per_second_released": sum(real) / sum(measured["times"]["released"]),
        "teraflops_per_second": flops / seconds / 1e12,
        "mfu": flops / seconds / peak if peak and setting.autocast else None,
    }


def against_sentence_transformers(setting: Setting, steps: int, warm_up: int) -> dict[str, Any]:
    """Compare its cached contrastive loss with our contrastive step: no MLM, one positive per anchor, no masks."""
    spans = setting.spans.model_copy(update={"num_positives": 1})  # its loss takes pairs
    setting = dataclasses.replace(setting, spans=spans, objective=DeclutrConfig(terms="contrastive"))
    try:
        reference = setting.padded("sentence_transformers")
    except ImportError as error:
        return {"ratio_median": None, "reason": f"not importable: {error}"}
    return compare(setting.trainer_side(), reference, list(setting.batches(warm_up + steps)), warm_up, setting.device)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = record.parser("step", __doc__)
    record.add_device(parser)
    workload.add_options(parser, "distilroberta", 4, (32, 512))
    parser.add_argument("--steps", type=int, help="timed steps; default: 5 on cpu, 30 on cuda")
    parser.add_argument("--warm-up", type=int, default=2, help="untimed steps before the timed ones")
    parser.add_argument("--dropout", type=float, default=0.0, help="of all sides in timed steps; default: 0")
    parser.add_argument("--compile", action="store_true", help="torch.compile all sides, with dynamic shapes")
    options = record.parse(parser, arguments)
    steps = options.steps or (30 if options.device == "cuda" else 5)
    objective = DeclutrConfig(loss={"kind": "ntxent", "temperature": TEMPERATURE})
    settings = {"documents": options.documents, "compile": options.compile, "dropout": options.dropout}
    setting = Setting.of(options, options.device, options.precision, objective=objective, **settings)
    released = against_released(setting, steps, options.warm_up)
    other = against_sentence_transformers(setting, steps, options.warm_up)
    figures = {
        "benchmark": "step",
        "objective": "declutr",
        "model": options.model,
        "device": options.device,
        "precision": "bf16" if setting.autocast else "fp32",
        "spans": options.spans,
        **settings,
        **released,
        "ratio_vs_sentence_transformers": other["ratio_median"],
        "sentence_transformers": other,
    }
    record.publish(figures, options)


if __name__ == "__main__":
    main()
