"""Ways to break a file of a run or of shards, and what a folder then holds."""

DAMAGED = {
    "blank": b" \n", "an empty object": b"{}", "an empty list": b"[]", "null": b"null", "half": b'{"host": "els',
    "wrong types": b'{"step": "six", "host": 1, "pid": "none", "from": 3, "token": null, "ended": 1, "encoder": 1}',
    "garbage": b"\xff\xfe\x00\x80garbage", "nested deeply": b"[" * 100_000,
}  # fmt: skip
"""What a kill, a full disk or somebody else leaves in a small JSON file."""


def truncate(path, num_bytes=10):
    path.write_bytes(path.read_bytes()[:-num_bytes])


def flip_a_bit(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }
