"""Settings of the search for duplicates."""

import math

from pydantic import Field

from declutr.common.config import Strict

_LEAST_CANDIDATE_SHARE = 0.9


class NearConfig(Strict):
    """Near-duplicates: documents whose sets of word n-grams overlap, |A ∩ B| / |A ∪ B| >= `similarity` (Jaccard).

    If a share c of a document's words is changed one by one, about (1 - c)^n of its n-grams stay and the similarity
    is (1 - c)^n / (2 - (1 - c)^n): for n = 3 0.94 at 1%, 0.75 at 5%, 0.57 at 10%, 0.34 at 20%.
    """

    similarity: float = Field(default=0.6, gt=0, le=1)
    """Least similarity of duplicates, estimated to about +-0.04."""
    ngram_words: int = Field(default=3, ge=1, le=32)
    """Words of a shingle; longer ones break at every changed word."""
    bands: int = Field(default=25, ge=1, le=1024)
    """Groups of signature slots; documents equal in one are compared."""
    rows: int = Field(default=5, ge=1, le=64)
    """Slots of a band; more find fewer pairs in less time."""

    @property
    def num_slots(self) -> int:
        """Length of a signature (the "number of permutations" of classical MinHash)."""
        return self.bands * self.rows


class DuplicatesConfig(Strict):
    """Duplicates: the first document in the order of the corpus is kept, the others are dropped and counted."""

    exact: bool = True
    """Drop documents whose text equals an earlier one's, whitespace aside."""
    near: NearConfig | None = None
    """Drop near-duplicates; `near: {}` takes the defaults."""

    @property
    def enabled(self) -> bool:
        """True if any kind of duplicate is searched for."""
        return self.exact or self.near is not None


def problems(config: DuplicatesConfig) -> list[str]:
    """Finds combinations of valid settings that do not work, one line each, with keys relative to the section."""
    near = config.near
    if near is None:
        return []
    # Documents slightly more similar than the limit must almost always be compared; at the limit itself the
    # verification is random anyway.
    similarity = min(1.0, near.similarity + 0.1)
    share = 1 - (1 - similarity**near.rows) ** near.bands  # probability that two documents so similar are compared
    if share >= _LEAST_CANDIDATE_SHARE:
        return []
    percent = math.floor(1000 * share) / 10
    return [
        f"near.bands = {near.bands}, near.rows = {near.rows}: only {percent:g}% of the pairs with similarity "
        f"{similarity:g} would be compared, {_LEAST_CANDIDATE_SHARE:.0%} are needed for near.similarity = "
        f"{near.similarity:g}; take more bands, fewer rows or a higher similarity"
    ]
