"""`declutr search`: an index with its encoder, opened once for many queries."""

import threading
from os import PathLike
from typing import Any

from declutr.common.errors import UsageError
from declutr.common.paths import expand
from declutr.embedding.index import Hit, SearchIndex


class Searcher:
    """An open index, for a service: its threads may share it, and it answers them one after the other.

    Args:
        index: folder of `declutr index`.
        model: the encoder, if it has moved since; None: the one that the index names, and the hub is not asked for it.
        weight: of the words of a hybrid index; None: the index's.
        trust_remote_code: run Python code that comes with the encoder.

    Raises:
        UsageError: the folder holds no index, one that is altered, or one of another encoder.
        EncoderError: the encoder cannot be loaded.
    """

    def __init__(
        self,
        index: str | PathLike[str],
        *,
        model: str | None = None,
        weight: float | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self._index = SearchIndex(expand(str(index)))
        if weight is not None:
            self._index.weigh(weight)
        from declutr.encoders.loading import encoder_of_index  # loads torch, which no problem of the index waits for

        self._encoder = encoder_of_index(self._index.facts.choice, model, trust_remote_code=trust_remote_code)
        self._index.check(self._encoder)
        self._lock = threading.Lock()

    @property
    def weight(self) -> float:
        """Weight of the words; 0 without words."""
        return self._index.weight

    def search(self, query: str, top: int = 10) -> list[Hit]:
        """The best `top` texts for a query, best first; of an index of passages the best passage of each text.

        Raises:
            UsageError: the index or the query is empty, no word of it is known, or `top` is below 1.
        """
        if top < 1:
            raise UsageError(f"top = {top}: must be at least 1")
        with self._lock:  # the encoder sets the number of torch's threads, which all threads share
            return self._index.search(self._encoder, query, top)


def search(index: str | PathLike[str], query: str, top: int = 10, **settings: Any) -> list[Hit]:
    """Search an index once; `Searcher` opens it for many queries, and has the settings and errors."""
    return Searcher(index, **settings).search(query, top)
