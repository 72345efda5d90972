"""The number of tokens in one forward of the encoder. It affects memory, never results."""

from dataclasses import dataclass
from typing import Literal

import torch

from declutr.trainer.data.batches import AnyBatch
from declutr.trainer.parallel.communicator import Communicator

# On a CPU larger forwards are not faster, and when memory runs out, the kernel kills the process without an error.
_CPU_TOKENS = 8192


class MicrobatchError(RuntimeError):
    """Memory is too small for a single span."""


@dataclass
class Microbatch:
    """Limit of the tokens in one forward, lowered during training if it is automatic.

    Attributes:
        max_tokens: the limit; None: a worker's whole share at once.
        automatic: lower `max_tokens` and repeat the step when memory runs out.
    """

    max_tokens: int | None = None
    automatic: bool = False

    @staticmethod
    def of(setting: int | Literal["auto"] | None, device: torch.device) -> "Microbatch":
        """Builds the limit from the setting `microbatch_tokens`; "auto" starts without a limit on a GPU."""
        if setting == "auto":
            return Microbatch(_CPU_TOKENS if device.type == "cpu" else None, automatic=True)
        return Microbatch(setting)

    def cut(self, spans: AnyBatch) -> list[AnyBatch]:
        """The microbatches of a worker's share."""
        return list(spans.microbatches(self.max_tokens))

    def lower(self, spans: AnyBatch, comm: Communicator) -> None:
        """Halves the limit of all workers after one ran out of memory in a step.

        Raises:
            MicrobatchError: the limit is already at the longest span.
        """
        longest = comm.all_reduce_max(int(spans.lengths.max()) if spans.num_spans else 0)
        tried = comm.all_reduce_max(spans.num_tokens if self.max_tokens is None else self.max_tokens)
        if tried <= longest:
            raise MicrobatchError(
                f"memory is too small for one span of {longest} tokens; use shorter spans (spans.max_tokens), "
                "a smaller encoder, precision: bf16 or encoder.activation_checkpointing: true"
            )
        self.max_tokens = max(longest, tried // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# Libraries that allocate without torch's allocator report a failure with an error of another type.
_FAILED_ALLOCATIONS = (
    "DefaultCPUAllocator",
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "Cuda failure 2 'out of memory'",  # NCCL
    "Cuda failure 'out of memory'",  # NCCL before 2.19
)


def out_of_memory(error: RuntimeError) -> bool:
    """True if this error is a failed allocation: on a GPU, by torch or a library, or (under a limit) on a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or any(phrase in str(error) for phrase in _FAILED_ALLOCATIONS)
