"""The lower layers of an encoder as a small start: python -m declutr.reproduction.lower_layers ENCODER 3 FOLDER."""

import argparse
from pathlib import Path

import torch

from declutr.common.storage import atomic_folder
from declutr.trainer.model.load_report import silence


def main(arguments: list[str] | None = None) -> None:
    """Write the folder."""
    options = argparse.ArgumentParser(prog="python -m declutr.reproduction.lower_layers", description=__doc__)
    options.add_argument("source", type=Path, help="folder of an encoder of BERT's or RoBERTa's family")
    options.add_argument("layers", type=int, help="layers to keep")
    options.add_argument("target", type=Path, help="new folder")
    given = options.parse_args(arguments)
    if not (given.source / "config.json").is_file():
        options.error(f"{given.source} has no config.json; name the folder of an encoder of transformers")
    if given.target.exists():
        options.error(f"{given.target} exists already; name a new folder")
    with atomic_folder(given.target) as aside:
        keep_lower_layers(given.source, given.layers, aside)


def keep_lower_layers(source: Path, layers: int, target: Path) -> None:
    """Write an encoder with the lower layers of another one, and its tokenizer.

    Raises:
        SystemExit: it has fewer layers.
    """
    from transformers import AutoModel, AutoTokenizer

    with silence():
        model = AutoModel.from_pretrained(source, dtype=torch.float32)
        if not 1 <= layers <= len(model.encoder.layer):
            raise SystemExit(f"{layers} layers: {source} has {len(model.encoder.layer)}")
        model.encoder.layer = model.encoder.layer[:layers]
        model.config.num_hidden_layers = layers
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(source).save_pretrained(target)


if __name__ == "__main__":
    main()
