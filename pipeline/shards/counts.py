"""Counts of the rows that were read: kept, dropped and failed, by reason."""

from collections import Counter

from pydantic import Field

from declutr.common.config import Strict


class ShardError(ValueError):
    """Shards that are missing, damaged, or different from their manifest."""


class Counts(Strict):
    """Counts of the documents that were read. They balance: read = kept + all dropped + all failed."""

    read: int
    kept: int
    dropped: dict[str, int]
    """Documents by drop reason."""
    failed: dict[str, int]
    """Documents by failure reason; a file that breaks off counts once."""
    text_bytes: int
    """UTF-8 bytes of the readable documents, whitespace-normalised."""
    longest_tokens: int
    """Tokens of the longest document, kept or not."""
    labels: dict[str, int] = Field(default_factory=dict)
    """Kept hypotheses, images or clips by label."""
    notes: dict[str, int] = Field(default_factory=dict)
    """Kept images or clips by what was changed, such as `first_frame` or `cut`."""

    def check(self, what: str) -> None:
        """Checks that the counts balance.

        Raises:
            ShardError: they do not.
        """
        explained = self.kept + sum(self.dropped.values()) + sum(self.failed.values())
        if self.read != explained:
            raise ShardError(f"{what}: {self.read} documents read, but {explained} kept, dropped or failed")


def sum_counts(counts: list[Counts]) -> Counts:
    """Sums counts over units."""
    dropped, failed, labels, notes = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for count in counts:
        dropped.update(count.dropped)
        failed.update(count.failed)
        labels.update(count.labels)
        notes.update(count.notes)
    return Counts(
        read=sum(count.read for count in counts),
        kept=sum(count.kept for count in counts),
        dropped=dict(sorted(dropped.items())),
        failed=dict(sorted(failed.items())),
        text_bytes=sum(count.text_bytes for count in counts),
        longest_tokens=max((count.longest_tokens for count in counts), default=0),
        labels=dict(sorted(labels.items())),
        notes=dict(sorted(notes.items())),
    )
