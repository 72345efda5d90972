"""A prepared folder with something to tell in every part of a report, some of it hostile."""

import os

import pytest
from prepared import Row, write_prepared

HOSTILE = (
    "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\"> </article></main> "
    "&amp; \u202eright to left\u202c \x00\x1b[31m \x9b \ud7ff \u2066 {} 'quoted' \"double\" " + "long" * 200
)


def words(number, count):
    return " ".join(f"w{(number * 7 + i * i) % 31}x{number if i == 0 else ''}" for i in range(count))


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """Folder, manifest."""
    folder = tmp_path_factory.mktemp("shards") / "<b>corpus & co"
    first = [Row(words(number, 40 + number * 3), language="en", source="web.tar!page.html") for number in range(40)]
    first += [Row(HOSTILE * 2, source="<script>alert(1)</script>\u202e.jsonl", language="en")]
    first += [Row(words(n, 30), "held-out", language="de") for n in range(100, 105)]
    first += [Row(words(n, 3), "too_short", language="en", detail=None) for n in range(200, 212)]
    first += [Row(HOSTILE, "language", tokenized=False, language="xx", detail="<i>detail</i>")]
    first += [Row(None, "invalid_json", detail="<script>document.title='run'</script> at 3") for _ in range(2)]
    second = [Row(words(3, 49), "duplicate", "b.jsonl", "00000:3 is kept, similarity 1.00", "en") for _ in range(6)]
    second += [
        Row(words(5, 55), "near_duplicate", "b.jsonl", f"00000:5 is kept, similarity 0.{n}", "en") for n in (91, 82)
    ]
    second += [Row(words(7, 61), "contaminated", "b.jsonl", "sts12: a b c (3 in all)", "en", tokenized=False)]
    second += [Row(words(8, 64), "train", "b.jsonl", "sts12: <b>d</b> (2 in all)", "en")]
    manifest = write_prepared(folder, [first, second])
    os.utime(folder / "manifest.json", (1_700_000_000, 1_700_000_000))
    return folder, manifest
