"""The step of SupCon on images and sounds against the released padded layout, for `benchmarks.step --objective supcon`.

The released VisualCSE and AudioCSE pass patch embeddings to the encoder's layers without an attention mask; sounds are
padded with zero frames to 1,024 frames. All images have one size, so packing cannot help them.

Legend: S clips, P patches of a clip after padding, F values of a patch, W width of the encoder.
"""

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import record
from benchmarks.step.sides import Side, compare, equality
from benchmarks.workload import models, packed
from benchmarks.workload.clips import Clips
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.data.patches import PatchBatch
from declutr.trainer.model.compilation import compile_layers
from declutr.trainer.model.frontend import Frontend
from declutr.trainer.objectives.supcon.loss import supcon
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.step.microbatch import Microbatch
from declutr.trainer.step.task import TrainTask

ROWS = 8
_PIXELS = 0.5, 0.5
_FRAMES = 1024  # of every clip in the released layout
_MELS = 128
_COMPARED = 2  # most rows of the batch whose gradients are compared, because float64 is slow


@dataclass(frozen=True)
class PaddedClips:
    """Clips of equal length.

    Attributes:
        values: `(S, P, F)` values of patches.
        labels: `(S / 2,)` keys of the labels.
        num_tokens: tokens of the packed clips.
    """

    values: Tensor
    labels: Tensor
    num_tokens: int

    @property
    def num_places(self) -> int:
        """Token places, CLS tokens and padding included."""
        return len(self.values) * (self.values.shape[1] + 1)


@dataclass(frozen=True)
class ClipSetting(packed.Workload):
    """Settings shared by both sides of a comparison."""

    content: Literal["images", "audio"] = "images"
    mixed: bool = True
    compile: bool = False

    def batches(self, count: int, rows: int) -> list[RankBatch]:
        """Make batches of `count` steps, on the CPU."""
        return [self._batch(rows, self.seed + step) for step in range(count)]

    def _batch(self, rows: int, seed: int) -> RankBatch:
        clips = Clips.of(self.content, rows, seed, self.mixed)
        return clips.collator.collate(clips.rows, np.zeros(rows, np.int64))

    def frontend(self) -> Frontend:
        """Build the frontend, with weights drawn from the seed."""
        config = Clips.of(self.content, 0, 0).collator.frontend
        high, wide = config.patch_size
        if self.content == "images":
            shape, normal = (3 * high * wide, (config.image_size // high) * (config.image_size // wide)), _PIXELS
        else:
            shape, normal = (high * wide, self.released_patches()), (0.0, 1.0)
        width = int(models.SIZES[self.size]["hidden_size"])
        return Frontend(config, *shape, width, self.seed, normal).to(self.device)

    def released_patches(self) -> int:
        """P of sounds."""
        high, wide = Clips.of("audio", 0, 0).collator.frontend.patch_size
        return (_FRAMES // high) * (_MELS // wide)

    def ours(self) -> Side:
        """Build the side of the trainer's step."""
        encoder = self.encoder()
        if self.compile:
            compile_layers(encoder.model.base_model)
        task = TrainTask(
            encoder=encoder,
            objective=self.loss(encoder.embedding_size),
            comm=Communicator(),
            seed=self.seed,
            microbatch=Microbatch(None),
            autocast=self.autocast,
            frontend=self.frontend(),
        )

        def gradients(batch: RankBatch) -> Tensor:
            found = task.attempt(batch, 1)
            assert found is not None
            return found.terms["supcon"]

        both = {"encoder": encoder.model, "objective": task.objective, "frontend": task.frontend}
        return Side(
            "ours",
            nn.ModuleDict(both),
            lambda batch: batch.to(self.device),
            gradients,
            lambda batch: encoder.token_places(batch.spans),
        )

    def released(self) -> Side:
        """Build the side of the released layout, with the same weights."""
        model = models.padded_model(self.size, self.dropout, self.seed, self.attention_dropout).to(self.device)
        if self.compile:
            model.base_model.encoder.compile(dynamic=True)
        objective, frontend = self.loss(int(model.config.hidden_size)), self.frontend()
        head = objective.get_submodule("head")

        def gradients(batch: PaddedClips) -> Tensor:
            with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                values = batch.values.to(frontend.cls.dtype) / (255 if batch.values.dtype == torch.uint8 else 1)
                values = (values - frontend.mean) / frontend.std
                cls = frontend.cls.expand(len(values), 1, -1)
                states = torch.cat([cls, frontend.patches(values)], dim=1)
                if frontend.positions is not None:
                    states = states + frontend.positions[: states.shape[1]]
                hidden = model.base_model.encoder(states).last_hidden_state
                first, second = head(hidden[:, 0]).unflatten(0, (-1, 2)).unbind(1)
            loss = supcon(torch.cat([first, second]), batch.labels.repeat(2), objective.config.temperature)
            loss.backward()
            return loss.detach()

        both = nn.ModuleDict({"encoder": model, "objective": objective, "frontend": frontend})
        return Side("released", both, self.padded, gradients, lambda batch: self.padded(batch).num_places)

    def padded(self, batch: RankBatch) -> PaddedClips:
        """The batch in the released layout."""
        clips = batch.spans
        assert isinstance(clips, PatchBatch)
        parts = [each[1:] for each in clips.values.split(clips.lengths.tolist())]
        size = len(parts[0]) if self.content == "images" else self.released_patches()
        padded = clips.values.new_zeros(len(parts), size, clips.values.shape[1])
        for row, part in enumerate(parts):
            padded[row, : len(part)] = part
        return PaddedClips(padded.to(self.device), batch.facts["label"].to(self.device), clips.num_tokens)


def measure(given: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Figures of images and of sounds: equality, and times with dropout of hidden states."""
    rows = given.documents or ROWS
    parts = {content: _measure(given, steps, rows, content) for content in ("images", "audio")}
    return {"documents": rows, "dropout": [given.dropout] * 2, **parts["images"], "audio": parts["audio"]}


def _measure(given: argparse.Namespace, steps: int, rows: int, content: Any) -> dict[str, Any]:
    device = torch.device(given.device)
    setting = ClipSetting.of(
        given,
        given.device,
        given.precision,
        objective=Clips.of(content, 0, 0).collator.config,
        dropout=given.dropout,
        attention_dropout=0.0,
        pooling="cls",
        content=content,
        compile=given.compile,
    )
    # The released padding changes the embeddings of short clips, so only whole ones can be compared.
    plain = dataclasses.replace(setting, dropout=0.0, autocast=None, compile=False, mixed=False)
    sides = plain.ours(), plain.released()
    (batch,) = plain.batches(1, min(rows, _COMPARED))
    loss_diff, grad_diff = equality(*sides, batch, device)
    for side in sides:
        side.model.double()
    _, exact_diff = equality(*sides, batch, device)
    record.progress(f"{content}: loss differs by {loss_diff:.2e}, gradients by {exact_diff:.2e} in float64")
    batches = setting.batches(given.warm_up + steps, rows)
    found = compare(setting.ours(), setting.released(), batches, given.warm_up, device)
    padded = [setting.padded(batch) for batch in batches[given.warm_up :]]
    real = sum(each.num_tokens for each in padded)
    return {
        **found,
        "loss_abs_diff": loss_diff,
        "grad_rel_diff": grad_diff,
        "grad_rel_diff_float64": exact_diff,
        "padding_share_released": 1 - real / sum(each.num_places for each in padded),
        "tokens_per_second": real / sum(found["times"]["ours"]),
    }
