"""The newest exchanges of this worker, from torch's flight recorder, which works for NCCL and Gloo."""

import os

import msgspec

_KEPT = 256  # exchanges, of which each takes about a kilobyte


class _Exchange(msgspec.Struct, frozen=True):
    """The part of an entry that is shown."""

    collective_seq_id: int
    profiling_name: str
    state: str
    retired: bool
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []


class _Trace(msgspec.Struct, frozen=True):
    entries: list[_Exchange] = []


def record_exchanges() -> None:
    """Turns the recorder on; it must be called before the process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_KEPT))


def newest_exchanges(most: int = 3) -> list[str]:
    """Descriptions of the newest exchanges, oldest first: number, kind, sizes, and whether it has ended.

    Empty without a recorder, which is not a public part of torch.
    """
    try:
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]
    except ImportError:
        return []
    trace = msgspec.json.decode(_dump_fr_trace_json(True, False), type=_Trace)
    return [
        f"{one.collective_seq_id} {one.profiling_name} {one.input_dtypes}{one.input_sizes}: "
        f"{'ended' if one.retired else one.state}"
        for one in trace.entries[-most:]
    ]
