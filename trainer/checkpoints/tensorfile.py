"""Writes a safetensors file and its checksum in one pass, alongside a training thread.

The safetensors library copies all tensors into one string first, holds Python's global lock while it writes, reports a
full disk as text instead of an `errno`, and needs a second pass for the checksum. It is used for reading.

The checksum is XXH3 (128 bits). Without a spare core a checkpoint slows the training, and SHA-256 took most of that
time. XXH3 detects damage by disks and networks; anyone who could forge it could change `state.json` too.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from declutr.trainer.checkpoints.state import XXH3

# safetensors' names, in its order of tensors: largest alignment first, then by name
_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPES)}
_CHUNK_BYTES = 16 * 2**20


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes contiguous CPU tensors to a new file that `safetensors.torch.load_file` reads; flushes it to the disk.

    Each chunk is written to the disk and dropped from the page cache. Otherwise a checkpoint would displace the shards
    in use, and new pages for a gigabyte cost more than writing it.

    Returns:
        The checksum of the tensors in memory, not of the bytes on the disk.

    Raises:
        OSError: the disk is full, the storage does not answer, or the file is shorter than the bytes written.
    """
    names = sorted(tensors, key=lambda name: (_RANKS[tensors[name].dtype], name))
    digest = xxhash.xxh3_128()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        written = _write(handle, memoryview(_header(names, tensors)), digest, 0)
        for name in names:
            written = _write(handle, _raw(tensors[name]), digest, written)
        os.fsync(handle)
        size = os.fstat(handle).st_size
        if size != written:
            raise OSError(f"{path} holds {size} bytes after {written} were written")
    finally:
        os.close(handle)
    return XXH3 + digest.hexdigest()


def _header(names: list[str], tensors: Mapping[str, Tensor]) -> bytes:
    entries, at = {}, 0
    for name in names:
        tensor = tensors[name]
        end = at + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _write(handle: int, raw: memoryview, digest: xxhash.xxh3_128, at: int) -> int:
    """Writes at an offset and returns the next one. Hashing and writing release Python's lock for the training."""
    for start in range(0, len(raw), _CHUNK_BYTES):
        chunk = raw[start : start + _CHUNK_BYTES]
        digest.update(chunk)
        done = 0
        while done < len(chunk):
            done += os.write(handle, chunk[done:])
        if len(chunk) == _CHUNK_BYTES:  # smaller pieces wait for the last fsync
            os.fdatasync(handle)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, at, len(chunk), os.POSIX_FADV_DONTNEED)
        at += len(chunk)
    return at
