"""Keys on disk, as a preparation leaves them."""

import pytest

from declutr.pipeline.duplicates.documents import Documents, number
from declutr.pipeline.duplicates.keys import write_keys
from declutr.pipeline.duplicates.pairs import bucket_pairs
from declutr.pipeline.duplicates.shingles import Signer
from declutr.pipeline.filters.document_filter import normalise
from declutr.pipeline.readers.corpus import document_id


@pytest.fixture(scope="session")
def write():
    """Writes the keys of texts, a list for each unit; returns the units' names. Ordinals are 1, 4, 7, ..."""

    def write_units(folder, units, config, order=None):
        signer = Signer(config.near) if config.near else None
        names = [f"{index:05d}" for index in range(len(units))]
        for index in order if order is not None else range(len(units)):
            texts = [normalise(text) for text in units[index]]
            write_keys(
                folder,
                names[index],
                config,
                [document_id(text.encode()) for text in texts],
                [3 * row + 1 for row in range(len(texts))],
                [signer.sign(text) for text in texts] if signer else [],
            )
        return names

    return write_units


@pytest.fixture(scope="session")
def search():
    """The pairs of every bucket, found in this process."""

    def search_buckets(folder, names, config, num_buckets=1):
        documents = Documents(number(folder, names, config)[0])
        return [bucket_pairs(documents, config, bucket, num_buckets) for bucket in range(num_buckets)]

    return search_buckets
