"""Small encoders as folders of sentence-transformers, with random weights: nothing is trained, nothing downloaded."""

import json

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModel

from declutr.cli.main import main
from declutr.pipeline.tokenizer.tokenization import train_tokenizer

TEXTS = [
    "ab cd", "", "one two three four five six seven " * 40, "x", "naïve façade ✓", "ab cd", "\n\t ",
    *(f"{'word ' * (number % 17)}{number} and more" for number in range(60)),
]  # fmt: skip
_SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
_SHAPE |= {"max_position_embeddings": 24, "initializer_range": 0.3}
_SMALL = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": 24}


def encoder_folder(folder, family="roberta", pooling="mean", after=(), max_tokens=20, **options):
    """Writes the folder; `after` names what follows pooling: Dense, Normalize. `options` are of the whole model."""
    tokenizer = train_tokenizer(TEXTS * 3, 300)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos", "cls", "sep")}
    settings = _SMALL if family == "distilbert" else _SHAPE
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModel.from_config(AutoConfig.for_model(family, vocab_size=len(tokenizer), **ids, **settings))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        modules, size = [("Transformer", ""), ("Pooling", "1_Pooling")], 32
        for number, kind in enumerate(after, start=2):
            modules.append((kind, f"{number}_{kind}"))
            (folder / f"{number}_{kind}").mkdir()
            if kind == "Dense":
                layer = torch.nn.Linear(size, 12)
                tanh = {"activation_function": "torch.nn.modules.activation.Tanh"}
                settings = {"in_features": size, "out_features": 12, "bias": True} | tanh
                write(folder / f"{number}_{kind}/config.json", settings)
                weights = {f"linear.{name}": value.detach() for name, value in layer.named_parameters()}
                save_file(weights, folder / f"{number}_{kind}/model.safetensors")
                size = 12
    write(folder / "modules.json", [module(*entry, number) for number, entry in enumerate(modules)])
    write(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False})
    write(folder / "config_sentence_transformers.json", {"similarity_fn_name": "cosine", "prompts": {}} | options)
    (folder / "1_Pooling").mkdir()
    write(folder / "1_Pooling/config.json", {"word_embedding_dimension": 32, "pooling_mode": pooling})
    return folder


def static_folder(folder, vectors):
    """Writes a StaticEmbedding of sentence-transformers: `{word: vector}`; other words have the vector 0."""
    folder.mkdir()
    words = ["[UNK]", *vectors]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    table = torch.tensor([[0.0] * len(vectors[words[1]]), *vectors.values()], dtype=torch.float32)
    save_file({"embedding.weight": table}, folder / "model.safetensors")
    write(folder / "modules.json", [module("StaticEmbedding", "")])
    return folder


def module(kind, path, number=0):
    return {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def embed_rows(folder, rows, *options, encoder="hashed-words:64", suffix=".npy"):
    """Writes texts, or rows of JSON Lines, to `in/a.jsonl` and embeds the folder; returns the file of embeddings."""
    (folder / "in").mkdir()
    jsonl(folder / "in/a.jsonl", [{"text": row} if isinstance(row, str) else row for row in rows])
    output = folder / f"out{suffix}"
    assert main(["embed", encoder, str(folder / "in"), "--output", str(output), *options]) == 0
    return output


def write(path, value):
    path.write_text(json.dumps(value))
