import pytest
from adapting import WORDS
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from declutr.pipeline.tokenizer.tokenization import train_tokenizer


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """A folder with a tiny encoder with random weights, which no test changes."""
    folder = tmp_path_factory.mktemp("encoder")
    train_tokenizer([" ".join(WORDS)] * 20, 1000).save_pretrained(folder)
    shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    shape |= {"vocab_size": len(AutoTokenizer.from_pretrained(folder)), "max_position_embeddings": 100}
    BertForMaskedLM(BertConfig(**shape)).save_pretrained(folder)
    return folder
