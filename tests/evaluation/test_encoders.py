"""Every kind of encoder, also of other languages, against what made it: sentence-transformers, transformers."""

import json

import numpy as np
import pytest
import torch
from encoderfiles import keys, remove
from families import REFUSED
from folders import TEXTS, encoder_folder, write
from messages import all_of
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer
from vocabularies import ROLES, unigram, wordpiece

from benchmarks.embed import documentation, paragraphs_of, sentences_of, write_encoder
from declutr.common.errors import ConfigError, EncoderError
from declutr.common.words import has_other_words
from declutr.encoders.loading import load_encoder, pack_linears
from declutr.encoders.protocol import sizes_of, unit_rows, vectors_fingerprint
from declutr.encoders.transformer import write_transformer
from declutr.encoders.words import HashedWords, words_of
from declutr.pipeline.tokenizer.tokenization import describe_tokenizer, load_tokenizer
from declutr.trainer.model.behind import Dense


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return encoder_folder(tmp_path_factory.mktemp("encoder") / "roberta")


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("family", "pooling", "after"), [
    ("roberta", "mean", ["Normalize"]), ("bert", "cls", ["Dense", "Normalize"]), ("modernbert", "max", ["Dense"]),
    ("distilbert", "mean", []), ("mpnet", "mean", ["Normalize"]),
])  # fmt: skip
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


def test_encoder_applies_prompt_and_lower_case(tmp_path):
    path = encoder_folder(tmp_path / "prompted", prompts={"query": "query: "}, default_prompt_name="query")
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


def test_a_missing_encoder_is_named(tmp_path):
    (tmp_path / "words.vec").write_text("cat 1 2")
    for name in (str(tmp_path), "no/such model", "hashed-words:many", "hashed-words:²", str(tmp_path / "words.vec")):
        with pytest.raises(EncoderError, match=r"cannot be|hashed-words:300|is no encoder|words\.vec is a file"):
            load_encoder(name)


def test_the_same_bits_on_any_number_of_threads_and_the_number_is_left_alone(folder, monkeypatch):
    encoder, before = load_encoder(str(folder), device="cpu"), torch.get_num_threads()
    whole = encoder.encode(TEXTS)
    monkeypatch.setattr("declutr.encoders.transformer._CPU_BATCH_TOKENS", 64)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(encoder.encode(TEXTS))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert found[0].tobytes() == found[1].tobytes()
    close(found[0], whole)


def test_windows_are_averaged_by_their_tokens(folder):
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


def test_fingerprints_tell_encoders_apart_and_untrained_weights_come_from_the_seed(folder):
    same = [load_encoder(str(folder)).fingerprint for _ in range(2)]
    assert same[0] == same[1]
    untrained = [load_encoder(f"untrained{seed}:{folder}") for seed in ("", "@1", "@0")]
    others = [load_encoder(str(folder), "cls"), load_encoder(str(folder), max_tokens=8), *untrained[:2]]
    others += [load_encoder("hashed-words:32"), load_encoder("hashed-words@1:32")]
    assert len({same[0], *(other.fingerprint for other in others)}) == 7
    first, other, again = (encoder.encode(["ab cd", "x"]) for encoder in untrained)
    assert first.tobytes() == again.tobytes()
    assert np.abs(first - other).max() > 1e-2


def test_hashed_words_are_the_same_on_every_machine_and_words_in_any_script():
    """Sentences that share words are nearer than others, also without spaces or with signs that follow letters."""
    encoder = load_encoder("hashed-words:40")
    found = encoder.encode(["The cat sat", "the CAT; sat", "", "sat the cat"])
    assert found.dtype == np.float32
    bits = np.packbits(encoder.encode(["cat"])[0] > 0, bitorder="little").tobytes()
    assert bits.hex() == "d3c1736c6f"  # written down once; a change would make old indexes worthless
    np.testing.assert_array_equal(found[0], found[3])
    assert not found[2].any()
    np.testing.assert_allclose(np.linalg.norm(encoder.encode(["cat"])), 1, rtol=1e-6)
    np.testing.assert_allclose(found[1], np.mean(encoder.encode(["the", "cat", ";", "sat"]), axis=0), atol=1e-7)
    for near, far in (
        (("一个女人正在切洋葱。", "一个女人正在切土豆。"), "狗在公园里跑。"), (("क्या हिन्दी", "हिन्दी में"), "नमस्ते दुनिया"),
    ):  # fmt: skip
        first, second, other = unit_rows(HashedWords(4096).encode([*near, far]))
        assert first @ second > first @ other + 0.2
    assert not has_other_words("good \u2764\ufe0f! 1\ufe0f\u20e3")
    assert words_of("Words, and signs!") == ["Words", ",", "and", "signs", "!"]
    upper, lower = (encoder.encode([text]) for text in ("Words, and signs!", "words, and signs!"))
    assert np.array_equal(upper, lower)


def test_encoder_that_is_written_with_a_further_layer_declares_no_sizes(tmp_path):
    """The layer mixes the numbers of which the first ones were an embedding."""
    model = encoder_folder(tmp_path / "model")
    keys("config.json", matryoshka_dimensions=[8, 32])(model)
    for name, more, sizes in (("same", [], (8,)), ("mixed", [Dense(nn.Linear(32, 32), nn.Identity())], ())):
        (tmp_path / name).mkdir()
        write_transformer(load_encoder(str(model), device="cpu"), more, tmp_path / name)
        assert sizes_of(load_encoder(str(tmp_path / name)), None) == sizes
    for declared in ("8", [8, "16"], [True], [0], [33]):
        keys("config.json", matryoshka_dimensions=declared)(model)
        encoder = load_encoder(str(model), device="cpu")
        with pytest.raises(EncoderError, match=all_of("matryoshka_dimensions", "1 to 32", "--sizes")):
            sizes_of(encoder, None)
        assert sizes_of(encoder, (8,)) == (8,)


@pytest.fixture(scope="module")
def bench_texts():
    sentences = sentences_of(documentation(), 60)
    return ["", *sentences[:40], *paragraphs_of(sentences, 3)]


@pytest.fixture(scope="module")
def bench_folder(bench_texts, tmp_path_factory):
    write_encoder(path := tmp_path_factory.mktemp("encoder"), "tiny", bench_texts, 600, seed=0)
    return str(path)


def test_bf16_has_a_cosine_of_at_least_0_999_and_is_told_apart(bench_folder, bench_texts):
    full, half = (load_encoder(bench_folder, device="cpu", precision=precision) for precision in ("fp32", "bf16"))
    a, b = full.encode(bench_texts), half.encode(bench_texts)
    assert b.dtype == np.float32
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert 0.999 <= cosines.min() < cosines.max() <= 1.0001
    assert not np.array_equal(a, b)
    assert full.fingerprint == half.fingerprint, "an index of a GPU can be searched on a CPU"
    assert vectors_fingerprint(full) == full.fingerprint != vectors_fingerprint(half)
    assert load_encoder(bench_folder, device="cpu").precision == "fp32"


@pytest.mark.parametrize(("family", "precision"), [("roberta", "bf16"), ("electra", "fp32")])
def test_a_cpu_with_units_for_bf16_uses_them_where_embeddings_stay_the_same(
    tmp_path, monkeypatch, caplog, family, precision
):
    path = encoder_folder(tmp_path / family, family)
    exact = load_encoder(path, device="cpu").encode(TEXTS)
    monkeypatch.setattr("declutr.encoders.loading.has_bf16", lambda _: True)
    encoder = load_encoder(path, device="cpu")
    assert encoder.precision == precision
    assert (unit_rows(encoder.encode(TEXTS)) * unit_rows(exact)).sum(axis=1).min() > 0.9999
    assert ("computed in fp32, as bf16 has a cosine of" in caplog.text) == (precision == "fp32")


def test_tokenizing_ahead_changes_nothing_but_the_batches_and_its_errors_reach_the_caller(bench_folder, bench_texts):
    encoder = load_encoder(bench_folder, device="cpu")
    whole = encoder.encode(bench_texts)
    for size in (1, 7, 44, 1000):
        object.__setattr__(encoder, "chunk_texts", size)
        assert np.abs(encoder.encode(bench_texts) - whole).max() < 1e-5
        assert encoder.encode([]).shape == (0, 32)
    object.__setattr__(encoder, "chunk_texts", 10)
    with pytest.raises(TypeError):
        encoder.encode([*bench_texts[:15], 7, *bench_texts[15:]])


def test_packed_linear_layers_serve_inference_alone():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 8, bias=False))
    inputs, names = torch.randn(2, 30, 48), list(module.state_dict())
    before = module(inputs)
    pack_linears(module)
    assert torch.equal(module(inputs), before)
    module(inputs).sum().backward()
    assert module[0].weight.grad is not None
    with torch.inference_mode():
        assert torch.allclose(module(inputs), before, atol=1e-6)
        assert module(inputs[:, :0]).shape == (2, 0, 8)
        assert torch.equal(module.double()(inputs.double()), module(inputs.double()))
    assert list(module.state_dict()) == names


LANGUAGES = ["你好，世界。", "Eine Frau läuft.", "Быстрая лиса", "", "naïve façade ✓ ﬁ", "东京" * 60, "L’été à Noël"]
_SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SAMPLE = [text * 5 for text in LANGUAGES if len(text) < 50]


def lacking(*roles, **options):
    others = {role: name for role, name in ROLES.items() if role not in ("cls", "sep", *roles)}
    return lambda: unigram(SAMPLE, 300, others, **options)


KINDS = {
    "xlm-roberta": ("xlm-roberta", lacking()), "camembert": ("camembert", lacking()),
    "no mask token": ("roberta", lacking("bos", "mask")), "no padding token": ("bert", lacking("pad")),
    "no token around a text": ("bert", lacking("bos", "eos", ends=False)),
    "cased WordPiece": ("bert", lambda: wordpiece(SAMPLE, 300, lowercase=False)),
}  # fmt: skip


def language_folder(folder, kind):
    family, make = KINDS[kind]
    tokenizer = make()
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "bos", "eos")}
    settings = _SHAPE | {"max_position_embeddings": 40, "initializer_range": 0.3, "vocab_size": len(tokenizer)}
    settings |= {name: value for name, value in ids.items() if value is not None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModel.from_config(AutoConfig.for_model(family, **settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_those_of_transformers(tmp_path, kind):
    folder = language_folder(tmp_path, kind)
    encoder = load_encoder(str(folder), device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    for text, embedding in zip(LANGUAGES, encoder.encode(LANGUAGES), strict=True):
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=encoder.max_tokens)
        if not inputs["input_ids"].numel():
            assert not embedding.any()  # a text without tokens has the embedding 0, and no NaN
            continue
        with torch.no_grad():
            hidden = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        np.testing.assert_allclose(embedding, hidden[0].mean(0).numpy(), atol=2e-6, err_msg=text)


def test_texts_without_tokens_are_embedded_among_windows_and_more_tokens_than_are_read_are_told(tmp_path, caplog):
    folder = language_folder(tmp_path, "no token around a text")
    limit = load_encoder(str(folder), max_tokens=9999).max_tokens
    assert f"max_tokens = 9999: {folder} reads at most {limit}" in caplog.text
    encoder = load_encoder(str(folder), device="cpu", max_tokens=8, long_texts="windows")
    embeddings = encoder.encode(["", "东京" * 60, ""])
    assert np.isfinite(embeddings).all()
    assert embeddings.any(axis=1).tolist() == [False, True, False]
    assert not encoder.encode([""]).any()


def test_a_vocabulary_alone_keeps_the_case_that_its_settings_name(tmp_path):
    """As older monolingual BERTs are published: `vocab.txt` and `do_lower_case`."""
    folder = language_folder(tmp_path, "cased WordPiece")
    whole = load_tokenizer(str(folder))
    vocabulary = whole.get_vocab()
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in sorted(vocabulary, key=vocabulary.get)))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    alone = load_tokenizer(str(folder))
    for text in LANGUAGES:
        assert alone(text)["input_ids"] == whole(text)["input_ids"], text
    info = describe_tokenizer(alone, "pretrained")
    assert (info.bos_token_id, info.eos_token_id, info.pad_token_id, info.mask_token_id) == (2, 3, 0, 4)


def test_a_sentencepiece_file_alone_is_refused_with_the_remedy(tmp_path):
    folder = language_folder(tmp_path, "xlm-roberta")
    remove("tokenizer.json", "tokenizer_config.json")(folder)
    (folder / "sentencepiece.bpe.model").write_bytes(b"\n\x0b\n\x03<s>\x15\x00\x00\x00\x00\x18\x03")
    remedy = "only a SentencePiece file; install sentencepiece, or add a tokenizer.json"
    for load, error in ((load_tokenizer, ConfigError), (load_encoder, EncoderError)):
        with pytest.raises(error, match=remedy):
            load(str(folder))
