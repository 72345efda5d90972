"""What the files of an encoder declare is computed, named as not read, or refused; nothing is replaced by a default."""

import json
import shutil

import numpy as np
import pytest
from folders import TEXTS, encoder_folder, write
from messages import all_of, says
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoModel, AutoTokenizer

from declutr.adaptation.candidates import load_transformer
from declutr.common.errors import EncoderError
from declutr.encoders.loading import load_encoder
from declutr.evaluation.retrieval.compare import embed_windows


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return encoder_folder(tmp_path_factory.mktemp("whole") / "encoder", after=["Dense"])


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "encoder")


def update(path, **values):
    write(path, (json.loads(path.read_text()) if path.exists() else {}) | values)


def retype(folder, place, kind):
    modules = json.loads((folder / "modules.json").read_text())
    modules[place]["type"] = kind
    write(folder / "modules.json", modules)


def no_tokenizer(folder):
    for path in folder.glob("*token*"):
        path.unlink()


def vocabularies(folder):
    return [folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt") if (folder / name).exists()]


def empty_vocabulary(folder):
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["model"] |= {"vocab": {}, "merges": []}
    write(folder / "tokenizer.json", settings)


def added_tokens(folder, number):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<new{place}>" for place in range(number)])
    tokenizer.save_pretrained(folder)


def rows_of_table(folder, number):
    model = AutoModel.from_pretrained(folder)
    model.resize_token_embeddings(number)
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_tokenizer, ("no file of a tokenizer", "tokenizer.json", "copy them")),
        (lambda f: [path.unlink() for path in vocabularies(f)], ("vocabulary of a tokenizer", "copy it")),
        (empty_vocabulary, ("vocabulary of its tokenizer is empty", "copy")),
        (lambda f: added_tokens(f, 1), ("'<new0>'", "table of embeddings")),
        (lambda f: added_tokens(f, 500), ("'<new499>'", "table of embeddings")),
        (lambda f: rows_of_table(f, 100), ("table of embeddings has 100 rows",)),
        (lambda f: retype(f, 0, "custom_st.Transformer"), ("custom_st.Transformer", "Python code of its own")),
        (lambda f: retype(f, 1, "mine.models.Pooling"), ("mine.models.Pooling", "Python code of its own")),
        (lambda f: retype(f, 2, "sentence_transformers_x.Dense"), ("sentence_transformers_x.Dense", "Python code")),
        (
            lambda f: update(f / "config.json", auto_map={"AutoModel": "modeling.Model"}),
            ("config.json", "auto_map", "--trust-remote-code"),
        ),
        (
            lambda f: update(f / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokens.Own", None]}),
            ("tokenizer_config.json", "auto_map", "--trust-remote-code"),
        ),
        (
            lambda f: update(f / "config_sentence_transformers.json", truncate_dim="8"),
            ("truncate_dim = 8", "number from 1"),
        ),
        (lambda f: update(f / "config_sentence_transformers.json", truncate_dim=0), ("truncate_dim = 0",)),
        (
            lambda f: update(f / "config_sentence_transformers.json", default_prompt_name="query"),
            ("default_prompt_name = query", "prompts are none", "remove it"),
        ),
        (
            lambda f: update(f / "2_Dense/config.json", activation_function="mine.Act"),
            ("2_Dense/config.json", "mine.Act", "supported are", "Tanh"),
        ),
        (
            lambda f: update(f / "1_Pooling/config.json", pooling_mode="lasttoken"),
            ("lasttoken", "take another encoder"),
        ),
    ],
)
def test_a_folder_that_is_not_what_it_seems_is_refused(folder, change, message):
    change(folder)
    with pytest.raises(EncoderError, match=all_of(*message)) as refusal:
        load_encoder(str(folder))
    assert "--pooling" not in str(refusal.value)


def test_a_static_table_of_another_package_is_no_export(folder):
    write(folder / "modules.json", [{"type": "mine.StaticEmbedding", "path": ""}])
    with pytest.raises(EncoderError, match=all_of("mine.StaticEmbedding", "Python code of its own")):
        load_encoder(str(folder))


DOUBLED = """
from transformers import RobertaModel


class Model(RobertaModel):
    def forward(self, *inputs, **options):
        output = super().forward(*inputs, **options)
        output.last_hidden_state = 2 * output.last_hidden_state
        return output
"""


def test_code_beside_a_type_of_the_library_runs_with_trust(folder):
    """The own class doubles the hidden states of the library's."""
    before = load_encoder(str(folder), pooling="mean").encode(TEXTS)
    (folder / "modeling.py").write_text(DOUBLED)
    update(folder / "config.json", auto_map={"AutoModel": "modeling.Model"})
    after = load_encoder(str(folder), trust_remote_code=True).encode(TEXTS)
    assert np.abs(after - before).max() > 0.1
    expected = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True).encode(TEXTS)
    assert after == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("after", [[], ["Normalize"], ["Dense"]])
@pytest.mark.parametrize("size", [8, 32])
def test_truncate_dim_cuts_embeddings_as_sentence_transformers_does(tmp_path, after, size):
    folder = encoder_folder(tmp_path / "encoder", after=after, truncate_dim=size)
    encoder = load_encoder(str(folder))
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert encoder.size == expected.shape[1]
    assert encoder.encode(TEXTS) == pytest.approx(expected, abs=2e-6)
    windows, owners = embed_windows(encoder, TEXTS)
    assert windows.shape[1] == encoder.size
    assert len(owners) > len(TEXTS), "a long text has windows"


def test_an_encoder_that_cuts_its_embeddings_is_not_adapted(tmp_path):
    folder = encoder_folder(tmp_path / "encoder", truncate_dim=8)
    with pytest.raises(EncoderError, match=all_of("truncate_dim = 8", "remove it")):
        load_transformer(str(folder))


def test_settings_that_change_nothing_here_are_named_once(folder, log):
    update(folder / "config_sentence_transformers.json", similarity_fn_name="dot", colour="red")
    update(folder / "sentence_bert_config.json", query_length=32, transformer_task="feature-extraction")
    update(folder / "1_Pooling/config.json", temperature=2)
    update(folder / "2_Dense/config.json", gain=3)
    for _ in range(2):
        load_encoder(str(folder))
    text = "\n".join(log)
    says(text, "config_sentence_transformers.json", "not read: colour = red, similarity_fn_name = dot")
    says(text, "sentence_bert_config.json", "not read: query_length = 32")
    says(text, "1_Pooling/config.json", "not read: temperature = 2")
    says(text, str(folder / "2_Dense/config.json"), "not read: gain = 3")
    assert text.count("colour") == 1
    assert "transformer_task" not in text


def test_a_folder_that_sentence_transformers_writes_is_read_whole(whole, tmp_path, log):
    SentenceTransformer(str(whole), device="cpu").save(str(tmp_path / "saved"))
    update(tmp_path / "saved/sentence_bert_config.json", model_args={"add_pooling_layer": False})  # as our exports have
    load_encoder(str(tmp_path / "saved"))
    assert "not read" not in "\n".join(log)


def test_a_module_names_the_folder_above(folder):
    for name in ("1_Pooling", "2_Dense"):
        with pytest.raises(EncoderError, match=all_of(name, "one module of an encoder", f"above it: {folder}")):
            load_encoder(str(folder / name))


def test_an_encoder_with_a_decoder_says_so(folder):
    shape = {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 1, "num_heads": 2}
    config = AutoConfig.for_model("t5", vocab_size=len(AutoTokenizer.from_pretrained(folder)), **shape)
    AutoModel.from_config(config).encoder.save_pretrained(folder)
    update(folder / "config.json", model_type="t5", is_encoder_decoder=True)
    with pytest.raises(EncoderError, match=all_of("model type t5 has a decoder")) as refusal:
        load_encoder(str(folder))
    assert "download" not in str(refusal.value).lower()
