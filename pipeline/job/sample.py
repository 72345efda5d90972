"""A sample of the corpus, spread evenly over it, and the tokenizer that is loaded or trained on the sample."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from declutr.common.console.logs import get_logger
from declutr.common.storage import atomic_folder
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.filters.document_filter import normalise
from declutr.pipeline.job.units import Unit, read_unit
from declutr.pipeline.readers.corpus import MIB
from declutr.pipeline.shards.manifest import TOKENIZER
from declutr.pipeline.texts import texts_of
from declutr.pipeline.tokenizer.batch_tokenizer import EngineName
from declutr.pipeline.tokenizer.engine import choose_engine
from declutr.pipeline.tokenizer.tokenization import (
    TokenizerInfo,
    TrainedTokenizer,
    describe_tokenizer,
    load_tokenizer,
    train_tokenizer,
)

_SAMPLED_UNITS = 256
_COMPARED_MIB = 0.5
"""Text of the corpus on which tokenizer engines are compared."""


def sample_texts(config: PipelineConfig, units: Sequence[Unit], sample_mib: float) -> Iterator[str]:
    """Normalised texts from the start of each unit (of 256 units chosen by hash, if there are more).

    If a unit is too short for its share, later units give more, so that the sample is full if the corpus suffices.
    """
    chosen = sorted(units, key=lambda unit: hashlib.blake2b(f"{config.seed}/{unit.name}".encode()).digest())
    chosen = sorted(chosen[:_SAMPLED_UNITS], key=lambda unit: (unit.num_bytes, unit.name))
    left = sample_mib * MIB
    for index, unit in enumerate(chosen):
        share = left / (len(chosen) - index)
        for record in read_unit(unit, config.corpus, config.content):
            if share <= 0:
                break
            for raw in texts_of(record):
                text = normalise(raw)
                share -= len(text)
                left -= len(text)
                yield text


def output_tokenizer(config: PipelineConfig, folder: Path, units: Sequence[Unit]) -> TokenizerInfo | None:
    """The tokenizer in the output folder; the first run creates it. None if the content has no text.

    Raises:
        OSError: it cannot be written.
    """
    tokenizer = config.tokenizer
    if tokenizer is None:
        return None
    if not (folder / TOKENIZER).exists():
        if isinstance(tokenizer, TrainedTokenizer):
            get_logger().info("training a tokenizer on %g MiB of the corpus", tokenizer.sample_mib)
            texts = sample_texts(config, units, tokenizer.sample_mib)
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


def output_engine(config: PipelineConfig, folder: Path, units: Sequence[Unit]) -> EngineName | None:
    """The engine for the tokenizer in the output folder; None if the content has no text.

    Raises:
        ConfigError: the engine in tokenizer.engine does not give the same ids.
    """
    if config.tokenizer is None:
        return None
    chosen = choose_engine(folder / TOKENIZER, config.tokenizer.engine, sample_texts(config, units, _COMPARED_MIB))
    get_logger().info("tokenizing with %s: %s", chosen.engine, chosen.reason)
    return chosen.engine
