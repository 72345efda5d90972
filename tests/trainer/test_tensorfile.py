"""The bytes are those of the safetensors library, and the checksum is that of the file."""

import resource
import signal

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save

from declutr.trainer.checkpoints import tensorfile
from declutr.trainer.checkpoints.state import has_checksum
from declutr.trainer.checkpoints.tensorfile import write_tensors

TENSORS = {
    "of many": torch.arange(5000, dtype=torch.float32).reshape(50, 100),
    "half": torch.randn(7, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "a step": torch.tensor(3.0),
    "ids": torch.arange(9),
    "none": torch.empty(0, 4),
    "flags": torch.tensor([True, False, True]),
    "double": torch.linspace(0, 1, 11, dtype=torch.float64),
    "sixteen": torch.ones(3, dtype=torch.float16),
    "bytes": torch.arange(13, dtype=torch.uint8),
    "thirty-two": torch.arange(5, dtype=torch.int32),
    "ümlaut": torch.ones(2),
}


@pytest.mark.parametrize("chunk_bytes", [64, 2**20])
def test_the_bytes_are_those_of_the_library(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(tensorfile, "_CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "it.safetensors"
    checksum = write_tensors(path, TENSORS)
    assert path.read_bytes() == save(TENSORS)
    assert checksum == f"xxh3:{xxhash.xxh3_128(path.read_bytes()).hexdigest()}"
    assert has_checksum(path, checksum)
    read = load_file(path)
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


def test_a_changed_bit_is_told_by_the_checksum(tmp_path):
    checksum = write_tensors(tmp_path / "it", TENSORS)
    raw = bytearray((tmp_path / "it").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "it").write_bytes(raw)
    assert not has_checksum(tmp_path / "it", checksum)


def test_tensorfile_of_no_tensors_is_read_back(tmp_path):
    write_tensors(tmp_path / "it", {})
    assert load_file(tmp_path / "it") == {}


def test_a_limit_on_files_is_an_error_with_its_number(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_tensors(tmp_path / "it", TENSORS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
