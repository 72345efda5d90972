"""The files that all tasks share: the tokenizer, loaded or trained on a sample of the corpus, and an index of tests."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from declutr.common.console.logs import get_logger
from declutr.common.storage import atomic_file, atomic_folder
from declutr.pipeline.filters.document_filter import normalise
from declutr.pipeline.filters.evaluation_sets import INDEX, build_index
from declutr.pipeline.job.output import Preparation
from declutr.pipeline.job.units import Corpus, Unit, read_unit
from declutr.pipeline.readers.corpus import MIB
from declutr.pipeline.shards.content import AnyContent
from declutr.pipeline.shards.manifest import TOKENIZER
from declutr.pipeline.texts import texts_of
from declutr.pipeline.tokenizer.batch_tokenizer import EngineName, choose_engine
from declutr.pipeline.tokenizer.tokenization import (
    TokenizerInfo,
    TrainedTokenizer,
    describe_tokenizer,
    load_tokenizer,
    train_tokenizer,
)

_SAMPLED_UNITS = 256
_COMPARED_MIB = 0.5  # text of the corpus on which tokenizer engines are compared


def sample_texts(
    units: Sequence[Unit], corpus: Corpus, content: AnyContent, seed: int, sample_mib: float
) -> Iterator[str]:
    """Normalised texts from the start of each unit (of 256 units chosen by hash, if there are more).

    If a unit is too short for its share, later units give more, so that the sample is full if the corpus suffices.
    """
    chosen = sorted(units, key=lambda unit: hashlib.blake2b(f"{seed}/{unit.name}".encode()).digest())
    chosen = sorted(chosen[:_SAMPLED_UNITS], key=lambda unit: (unit.num_bytes, unit.name))
    left = sample_mib * MIB
    for index, unit in enumerate(chosen):
        share = left / (len(chosen) - index)
        for record in read_unit(unit, corpus, content):
            if share <= 0:
                break
            for raw in texts_of(record):
                text = normalise(raw)
                share -= len(text)
                left -= len(text)
                yield text


def write_shared_files(job: Preparation, folder: Path) -> TokenizerInfo | None:
    """Writes the files that every task needs, unless they exist; None if the content has no text.

    Raises:
        OSError: they cannot be written.
    """
    config, tokenizer = job.config, job.config.tokenizer
    if config.filters.contamination and not (folder / INDEX).exists():
        with atomic_file(folder / INDEX) as aside:
            build_index(config.filters.contamination, aside)
    if tokenizer is None:
        return None
    if not (folder / TOKENIZER).exists():
        if isinstance(tokenizer, TrainedTokenizer):
            get_logger().info("training a tokenizer on %g MiB of the corpus", tokenizer.sample_mib)
            texts = sample_texts(job.units, config.corpus, config.content, config.seed, tokenizer.sample_mib)
            hf_tokenizer = train_tokenizer(texts, tokenizer.vocab_size)
        else:
            hf_tokenizer = load_tokenizer(tokenizer.name, tokenizer.trust_remote_code)
        with atomic_folder(folder / TOKENIZER) as aside:
            try:
                hf_tokenizer.save_pretrained(str(aside))
            except Exception as error:
                if type(error) is not Exception:
                    raise
                # `tokenizers` raises plain Exception.
                raise OSError(f"{folder / TOKENIZER} cannot be written: {error}") from error
    return describe_tokenizer(load_tokenizer(str(folder / TOKENIZER)), tokenizer.kind)


def output_engine(job: Preparation, folder: Path, units: Sequence[Unit]) -> EngineName | None:
    """The engine for the tokenizer in a folder, compared on texts of units; None if the content has no text.

    Raises:
        ConfigError: the engine in tokenizer.engine does not give the same ids.
    """
    config = job.config
    if config.tokenizer is None:
        return None
    texts = sample_texts(units, config.corpus, config.content, config.seed, _COMPARED_MIB)
    engine, reason = choose_engine(folder / TOKENIZER, config.tokenizer.engine, texts)
    get_logger().info("tokenizing with %s: %s", engine, reason)
    return engine
