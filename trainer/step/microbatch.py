"""How much goes through the encoder at once: a question of memory, never of results."""

from dataclasses import dataclass
from typing import Literal

import torch

from trainer.data.batches import SpanBatch
from trainer.parallel.world import World

# On a CPU there is no gain in larger forwards, and running out of memory ends in the kernel, not in an error.
_CPU_TOKENS = 8192


class MicrobatchError(RuntimeError):
    """Not even a single span fits."""


@dataclass
class Microbatch:
    """The most tokens of one forward, found while training when it is automatic.

    Attributes:
        max_tokens: None: a worker's whole share at once.
        automatic: lower `max_tokens` when memory runs out, and take the step again.
    """

    max_tokens: int | None = None
    automatic: bool = False

    @staticmethod
    def of(setting: int | Literal["auto"] | None, device: torch.device) -> "Microbatch":
        """From the setting `microbatch_tokens`; "auto" begins with everything on a GPU."""
        if setting == "auto":
            return Microbatch(_CPU_TOKENS if device.type == "cpu" else None, automatic=True)
        return Microbatch(setting)

    def cut(self, spans: SpanBatch) -> list[SpanBatch]:
        """The pieces of a share."""
        return spans.microbatches(self.max_tokens)

    def lower(self, spans: SpanBatch, world: World) -> None:
        """Halves the limit of all workers, after a step for which the memory of one was not enough.

        Raises:
            MicrobatchError: the limit is below the longest span already.
        """
        longest = world.largest(int(spans.lengths.max()) if spans.num_spans else 0)
        tried = world.largest(spans.num_tokens if self.max_tokens is None else self.max_tokens)
        if tried <= longest:
            raise MicrobatchError(
                f"memory is not enough for one span of {longest} tokens: use shorter spans (spans.max_tokens), "
                "a smaller encoder, precision: bf16 or encoder.activation_checkpointing: true"
            )
        self.max_tokens = max(longest, tried // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def out_of_memory(error: RuntimeError) -> bool:
    """Is this error an allocation that failed, on a GPU or (under a limit) on a CPU?"""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
