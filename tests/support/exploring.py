"""An index with hostile texts and the server of `declutr explore` over it, in this process."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from declutr.cli.main import main
from declutr.embedding.index import SearchIndex
from declutr.encoders.loading import load_encoder
from declutr.evaluation.explore.explorer import Explorer
from declutr.evaluation.explore.server import ExploreServer, listen

ENCODER = "hashed-words:64"
HOSTILE = (
    "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\"></li></ol> &amp; \u202eright "
    "to left\u202c </script><style>*{display:none}</style><a href=\"javascript:document.title='run'\">x</a><!-- ]]> "
    "<svg/onload=alert(1)>'\"--></textarea><base href=//evil.example> \x1b[31m \u2066 {} zebra"
)
HOSTILE_SOURCE = "<b onclick=alert(1)>bold</b>\u202e.jsonl"
ANIMALS = [
    f"the {animal} {deed} on the mat" for animal in ("cat", "dog", "hen", "fox") for deed in ("sat", "ate", "ran")
]
WEATHER = [
    f"{kind} over {place} until {day}"
    for kind in ("rain", "snow")
    for place in ("hill", "sea")
    for day in ("noon", "night")
]
TEXTS = {
    "animals.jsonl": ANIMALS,
    "weather.jsonl": WEATHER,
    HOSTILE_SOURCE: [HOSTILE, "a zebra, harmless", "cat " * 400],
}
NUM_TEXTS = sum(map(len, TEXTS.values()))


def write_index(folder: Path, *options: str) -> Path:
    """Embeds the texts, one file a source, and indexes them with options; returns the folder of the index."""
    (folder / "texts").mkdir()
    for name, texts in TEXTS.items():
        lines = "".join(json.dumps({"text": text, "from": name}) + "\n" for text in texts)
        # "/" would be a folder
        (folder / "texts" / name.replace("/", "")).write_text(lines)
    embeddings = folder / "out.npy"
    assert main(["embed", ENCODER, str(folder / "texts"), "--output", str(embeddings)]) == 0
    assert main(["index", str(embeddings), "--output", str(folder / "index"), "--source-field", "from", *options]) == 0
    return folder / "index"


@contextmanager
def serving(index: Path, map_texts: int = 5_000) -> Iterator[ExploreServer]:
    """Serves an index from a thread; afterwards nothing answers, not on a connection that a browser has kept ready."""
    explorer = Explorer(SearchIndex(index), load_encoder(ENCODER), map_texts=map_texts)
    connections: list[socket.socket] = []

    class Recorded(ExploreServer):
        def get_request(self) -> tuple[socket.socket, Any]:
            connection, address = super().get_request()
            connections.append(connection)
            return connection, address

    with Recorded(explorer, listen()) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            for connection in connections:
                with suppress(OSError):  # ended before
                    connection.shutdown(socket.SHUT_RDWR)
