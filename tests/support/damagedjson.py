"""What a kill, a full disk or somebody else leaves in a small JSON file."""

DAMAGED = {
    "blank": b" \n",
    "an empty object": b"{}",
    "an empty list": b"[]",
    "null": b"null",
    "half": b'{"host": "els',
    "wrong types": b'{"step": "six", "host": 1, "pid": "none", "from": 3, "token": null, "ended": 1, "encoder": 1}',
    "garbage": b"\xff\xfe\x00\x80garbage",
    "nested deeply": b"[" * 100_000,
}
