"""Ways to break a file of a run or of shards."""


def truncate(path, num_bytes=10):
    """Cuts bytes off the end of a file."""
    path.write_bytes(path.read_bytes()[:-num_bytes])


def flip_a_bit(path):
    """Changes a bit in the middle of a file."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def empty(path):
    """Leaves a file without content."""
    path.write_bytes(b"")


def remove(path):
    """Deletes a file."""
    path.unlink()
