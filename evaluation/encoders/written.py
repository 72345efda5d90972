"""Writing of a loaded encoder as a folder that sentence-transformers and this project load."""

from collections.abc import Sequence
from pathlib import Path

from declutr.common.storage import read_json, write_json
from declutr.evaluation.encoders.transformer import TransformerEncoder
from declutr.trainer.driver.export import write_encoder
from declutr.trainer.model.behind import Step, steps_of, write_steps


def write_transformer(encoder: TransformerEncoder, more: Sequence[Step], folder: Path) -> None:
    """Write the encoder to an empty folder, with its own steps behind the pooling and then `more`."""
    write_encoder(encoder.encoder, encoder.tokenizer, folder)
    limits = read_json(folder / "sentence_bert_config.json")
    write_json(folder / "sentence_bert_config.json", limits | {"max_seq_length": encoder.max_tokens})
    if encoder.prompt:
        options = read_json(folder / "config_sentence_transformers.json")
        named = {"prompts": {"default": encoder.prompt}, "default_prompt_name": "default"}
        write_json(folder / "config_sentence_transformers.json", options | named)
    write_steps(folder, [*steps_of(encoder.after), *more])
