"""Ways to break a file of a run or of shards, and what a folder then holds."""


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


def contents(folder):
    """Bytes of each file below a folder, and targets of links, by name."""
    return {
        path.relative_to(folder).as_posix(): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }
