"""Every kind of encoder against what made it: sentence-transformers, transformers, arithmetic."""

import gzip
import json

import numpy as np
import pytest
import torch
from families import REFUSED
from folders import TEXTS, encoder_folder, write
from messages import all_of, says
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoModel, AutoTokenizer

from declutr.cli.main import main
from declutr.common.errors import EncoderError
from declutr.encoders.cut import sizes_of
from declutr.encoders.loading import load_encoder
from declutr.encoders.transformer import write_transformer
from declutr.trainer.model.behind import Dense


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return encoder_folder(tmp_path_factory.mktemp("encoder") / "roberta")


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "pooling", "after"),
    [
        ("roberta", "mean", ["Normalize"]),
        ("bert", "cls", ["Dense", "Normalize"]),
        ("modernbert", "max", ["Dense"]),
        ("distilbert", "mean", []),
        ("mpnet", "mean", ["Normalize"]),
    ],
)
def test_sentence_transformers_folder_gives_its_embeddings(tmp_path, family, pooling, after):
    path = encoder_folder(tmp_path / family, family, pooling, after)
    encoder = load_encoder(str(path), device="cpu")
    expected = SentenceTransformer(str(path), device="cpu").encode(TEXTS)
    assert encoder.size == expected.shape[1] == (12 if "Dense" in after else 32)
    close(encoder.encode(TEXTS), expected)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_whose_padding_reaches_the_texts_is_refused_by_name(family, folder, tmp_path):
    """A text of a padded batch would differ from the same text alone."""
    settings = REFUSED[family] | {"pad_token_id": 1, "max_position_embeddings": 140, "initializer_range": 0.3}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **{**settings, "bos_token_id": 0})
    AutoModel.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(EncoderError, match=all_of(f"model type {family}", "other texts")):
        load_encoder(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("prompts", "default", "told"),
    [
        ({"query": "query: ", "passage": "passage: "}, None, ("query = 'query: '", "passage = 'passage: '", "none")),
        ({"query": "query: ", "document": ""}, None, ("query = 'query: '",)),
        ({"query": "query: ", "document": "text: "}, "document", ("query = 'query: '", "'text: '")),
        ({"query": "", "document": ""}, None, ()),
        ({"query": "same: ", "document": "same: "}, "query", ()),
        ({"classification": "class: "}, None, ()),
    ],
)
def test_prompts_for_queries_or_documents_alone_are_named_once_because_none_is_applied(
    tmp_path, capsys, prompts, default, told
):
    path = encoder_folder(tmp_path / "prompted", prompts=prompts, default_prompt_name=default)
    (tmp_path / "in.txt").write_text("ab cd\n")
    for name in ("first.npy", "second.npy"):
        assert main(["embed", str(path), str(tmp_path / "in.txt"), "--output", str(tmp_path / name)]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "not applied" in line]
    assert len(lines) == bool(told)
    if told:
        says(lines, *told, "default_prompt_name")


def test_encoder_applies_prompt_and_lower_case(tmp_path):
    options = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    path = encoder_folder(tmp_path / "prompted", **options)
    write(path / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": True})
    encoder, theirs = load_encoder(str(path), device="cpu"), SentenceTransformer(str(path), device="cpu")
    texts = ["ONE Two", "ab CD"]
    close(encoder.encode(texts), theirs.encode(texts))
    close(encoder.encode(["ONE Two"]), encoder.encode(["one two"]))


def test_a_plain_transformers_folder_is_pooled_by_its_mean(folder, tmp_path):
    path = tmp_path / "plain"
    AutoModel.from_pretrained(folder).save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(path)
    close(load_encoder(str(path), device="cpu").encode(["ab cd"]), load_encoder(str(folder)).encode(["ab cd"]))
    hidden = AutoModel.from_pretrained(path).eval()(**tokenizer(["ab cd"], return_tensors="pt")).last_hidden_state
    close(load_encoder(str(path), "cls").encode(["ab cd"]), hidden[:, 0].detach().numpy())


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}, "mean\\+max"),
        ("1_Pooling/config.json", {"pooling_mode_lasttoken": True}, "lasttoken"),
        ("2_Dense/config.json", {"in_features": 32, "out_features": 12, "activation_function": "os.system"}, "os.sys"),
        ("modules.json", [{"type": "x.Transformer", "path": ""}, {"type": "x.WordWeights", "path": ""}], "WordWeights"),
    ],
)
def test_encoder_that_cannot_be_computed_exactly_is_refused(tmp_path, file, content, message):
    path = encoder_folder(tmp_path / "odd", after=["Dense"])
    write(path / file, content)
    with pytest.raises(EncoderError, match=message):
        load_encoder(str(path))


def test_a_missing_encoder_is_named(tmp_path):
    for name in (str(tmp_path), "no/such model", "hashed-words:many", str(tmp_path / "missing.vec")):
        with pytest.raises(EncoderError, match=r"cannot be|hashed-words:300|is no encoder"):
            load_encoder(name)


def test_the_same_bits_on_any_number_of_threads_and_the_number_is_left_alone(folder):
    encoder, before = load_encoder(str(folder), device="cpu"), torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(encoder.encode(TEXTS, batch_tokens=64))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert found[0].tobytes() == found[1].tobytes()
    close(found[0], encoder.encode(TEXTS))


def test_windows_are_averaged_by_their_tokens(folder):
    """Against the equation, written out with transformers."""
    text = TEXTS[2]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) % 18
    total = 0
    for start in range(0, len(ids), 18):
        window = [tokenizer.bos_token_id, *ids[start : start + 18], tokenizer.eos_token_id]
        hidden = model(input_ids=torch.tensor([window])).last_hidden_state.mean(1)
        total = total + hidden.detach().numpy()[0] * (len(window) - 2)
    windows = load_encoder(str(folder), long_texts="windows", device="cpu")
    found = windows.encode(TEXTS)
    np.testing.assert_allclose(found[2], total / len(ids), atol=1e-5)
    cut = load_encoder(str(folder), device="cpu")
    short = [0, 1, 3, 4, 5, 6]
    close(found[short], cut.encode(TEXTS)[short])
    assert np.abs(found[2] - cut.encode([text])[0]).max() > 1e-2
    assert windows.fingerprint != cut.fingerprint


def test_fingerprints_tell_encoders_apart(folder):
    same = [load_encoder(str(folder)).fingerprint for _ in range(2)]
    assert same[0] == same[1]
    others = [
        load_encoder(str(folder), "cls"),
        load_encoder(str(folder), max_tokens=8),
        load_encoder(f"untrained:{folder}"),
        load_encoder(f"untrained@1:{folder}"),
        load_encoder("hashed-words:32"),
        load_encoder("hashed-words@1:32"),
    ]
    assert len({same[0], *(other.fingerprint for other in others)}) == 7


def test_untrained_weights_come_from_the_seed(folder):
    texts = ["ab cd", "x"]
    first, again, other = (load_encoder(f"untrained{seed}:{folder}").encode(texts) for seed in ("", "@0", "@1"))
    assert first.tobytes() == again.tobytes()
    assert np.abs(first - other).max() > 1e-2


def test_hashed_words_are_the_same_on_every_machine():
    encoder = load_encoder("hashed-words:40")
    found = encoder.encode(["The cat sat", "the CAT; sat", "", "sat the cat"])
    assert found.dtype == np.float32
    bits = np.packbits(encoder.encode(["cat"])[0] > 0, bitorder="little").tobytes()
    assert bits.hex() == "d3c1736c6f"  # written down once; a change would make old indexes worthless
    np.testing.assert_array_equal(found[0], found[3])
    assert not found[2].any()
    np.testing.assert_allclose(np.linalg.norm(encoder.encode(["cat"])), 1, rtol=1e-6)
    mean = np.mean(encoder.encode(["the", "cat", ";", "sat"]), axis=0)
    np.testing.assert_allclose(found[1], mean, atol=1e-7)


@pytest.mark.parametrize("head", ["3 2\n", ""])
@pytest.mark.parametrize("ending", [".vec", ".txt.gz"])
def test_word_vectors_of_both_formats_are_read(tmp_path, head, ending):
    path = tmp_path / f"words{ending}"
    raw = (head + "the 1 2\ncat 3 -4.5\n. . 7 7\nThe 0 9\n").encode()
    path.write_bytes(gzip.compress(raw) if ending.endswith("gz") else raw)
    whole = load_encoder(str(path))
    assert whole.size == 2
    np.testing.assert_array_equal(whole.encode(["the CAT unknown", "The", "?"]), [[2, -1.25], [0, 9], [0, 0]])
    few = load_encoder(str(path), vocabulary=["CAT"])
    np.testing.assert_array_equal(few.encode(["the cat"]), [[3, -4.5]])
    assert few.fingerprint == whole.fingerprint


@pytest.mark.parametrize(
    "raw", [b"", b"the,1,2\n", b"a 1 2\nb 1\n", b"a 1 2\nb 1 x\n", b"3 0\na\nb\n", b"\x1f\x8b broken"]
)
def test_broken_word_vectors_are_refused(tmp_path, raw):
    path = tmp_path / ("words.vec.gz" if raw[:1] == b"\x1f" else "words.vec")
    path.write_bytes(raw)
    with pytest.raises(EncoderError, match=r"words\.vec"):
        load_encoder(str(path))


def test_encoder_that_is_written_with_a_further_layer_declares_no_sizes(tmp_path):
    """The layer mixes the numbers of which the first ones were an embedding."""
    model = encoder_folder(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [8, 32]}))
    encoder = load_encoder(str(model), device="cpu")
    for name, more in (("same", []), ("mixed", [Dense(torch.nn.Linear(32, 32), torch.nn.Identity())])):
        (tmp_path / name).mkdir()
        write_transformer(encoder, more, tmp_path / name)
    assert sizes_of(load_encoder(str(tmp_path / "same")), None) == (8,)
    assert sizes_of(load_encoder(str(tmp_path / "mixed")), None) == ()


@pytest.mark.parametrize("declared", ["8", [8, "16"], [True], [0], [33]])
def test_sizes_that_a_folder_declares_wrongly_are_refused(tmp_path, declared):
    model = encoder_folder(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": declared}))
    encoder = load_encoder(str(model), device="cpu")
    with pytest.raises(EncoderError, match=all_of("matryoshka_dimensions", "1 to 32", "--sizes")):
        sizes_of(encoder, None)
    assert sizes_of(encoder, (8,)) == (8,)
