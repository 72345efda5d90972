"""The lower layers of an encoder as a small start: python -m declutr.reproduction.lower_layers ENCODER 3 FOLDER."""

import argparse
from pathlib import Path

import torch

from declutr.common.storage import atomic_folder
from declutr.trainer.model.language_model import silence


def main(arguments: list[str] | None = None) -> None:
    """Write a folder with the lower layers of an encoder, and its tokenizer."""
    parser = argparse.ArgumentParser(prog="python -m declutr.reproduction.lower_layers", description=__doc__)
    parser.add_argument("source", type=Path, help="folder of an encoder of BERT's or RoBERTa's family")
    parser.add_argument("layers", type=int, help="layers to keep")
    parser.add_argument("target", type=Path, help="new folder")
    options = parser.parse_args(arguments)
    if not (options.source / "config.json").is_file():
        parser.error(f"{options.source} has no config.json; name the folder of an encoder of transformers")
    if options.target.exists():
        parser.error(f"{options.target} exists already; name a new folder")
    from transformers import AutoModel, AutoTokenizer

    with silence():
        # False, because None would ask at a terminal whether code beside the weights may run
        model = AutoModel.from_pretrained(options.source, dtype=torch.float32, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(options.source, trust_remote_code=False)
        if not 1 <= options.layers <= len(model.encoder.layer):
            parser.error(f"{options.layers} layers: {options.source} has {len(model.encoder.layer)}")
        model.encoder.layer = model.encoder.layer[: options.layers]
        model.config.num_hidden_layers = options.layers  # or a load would draw the layers that are gone
        with atomic_folder(options.target) as aside:
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)


if __name__ == "__main__":
    main()
