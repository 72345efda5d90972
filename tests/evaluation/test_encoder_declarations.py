"""What files of an encoder declare is computed, prompts too, or named as not read; hostile ones are refused unused."""

import json
import shutil
import signal

import numpy as np
import pytest
import torch
from encoderfiles import BERT, DENSE, POOLING, SENTENCES, keys, modules, pipe, text
from folders import TEXTS, encoder_folder, jsonl
from messages import all_of, says
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import cos_sim
from tinyruns import state_of
from transformers import AutoConfig, AutoModel, AutoTokenizer

import declutr
from declutr.adaptation.candidates import load_transformer
from declutr.cli.main import main
from declutr.common.errors import ConfigError, DamagedError, EncoderError
from declutr.embedding.note import read_note
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import in_role, unit_rows
from declutr.evaluation.retrieval.compare import embed_windows
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import ENCODER
from declutr.trainer.model.bounds import check_config, check_size, check_steps

DOUBLED = """
from transformers import RobertaModel


class Model(RobertaModel):
    def forward(self, *inputs, **options):
        output = super().forward(*inputs, **options)
        output.last_hidden_state = 2 * output.last_hidden_state
        return output
"""


def test_code_beside_a_type_of_the_library_runs_with_trust(folder):
    before = load_encoder(str(folder), pooling="mean").encode(TEXTS)
    (folder / "modeling.py").write_text(DOUBLED)
    keys("config.json", auto_map={"AutoModel": "modeling.Model"})(folder)
    after = load_encoder(str(folder), trust_remote_code=True).encode(TEXTS)
    assert np.abs(after - before).max() > 0.1
    expected = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True).encode(TEXTS)
    assert after == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("after", [[], ["Normalize"], ["Dense"]])
@pytest.mark.parametrize("size", [8, 32])
def test_truncate_dim_cuts_embeddings_as_sentence_transformers_does_and_is_not_adapted(tmp_path, after, size):
    folder = encoder_folder(tmp_path / "encoder", after=after, truncate_dim=size)
    encoder = load_encoder(str(folder))
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert encoder.size == expected.shape[1]
    assert encoder.encode(TEXTS) == pytest.approx(expected, abs=2e-6)
    windows, owners = embed_windows(encoder, TEXTS)
    assert windows.shape[1] == encoder.size
    assert len(owners) > len(TEXTS), "a long text has windows"
    if size == 8:
        with pytest.raises(EncoderError, match=all_of("truncate_dim = 8", "remove it")):
            load_transformer(str(folder))


def test_settings_that_change_nothing_here_are_named_once(folder, whole, tmp_path, log):
    SentenceTransformer(str(whole), device="cpu").save(str(tmp_path / "saved"))
    keys(BERT, model_args={"add_pooling_layer": False})(tmp_path / "saved")  # as our exports have
    load_encoder(str(tmp_path / "saved"))
    assert "not read" not in "\n".join(log)
    keys(SENTENCES, similarity_fn_name="dot", colour="red")(folder)
    keys(BERT, query_length=32, transformer_task="feature-extraction")(folder)
    keys(POOLING, temperature=2)(folder)
    keys(DENSE, gain=3)(folder)
    for _ in range(2):
        load_encoder(str(folder))
    warnings = "\n".join(log)
    for file, setting in (
        (SENTENCES, "colour = red, similarity_fn_name = dot"), (BERT, "query_length = 32"),
        (POOLING, "temperature = 2"), (str(folder / DENSE), "gain = 3"),
    ):  # fmt: skip
        says(warnings, file, f"not read: {setting}")
    assert warnings.count("colour") == 1
    assert "transformer_task" not in warnings


def test_an_encoder_with_a_decoder_says_so_and_a_module_names_the_folder_above(folder):
    for name in ("1_Pooling", "2_Dense"):
        with pytest.raises(EncoderError, match=all_of(name, "one module of an encoder", f"above it: {folder}")):
            load_encoder(str(folder / name))
    shape = {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 1, "num_heads": 2}
    config = AutoConfig.for_model("t5", vocab_size=len(AutoTokenizer.from_pretrained(folder)), **shape)
    AutoModel.from_config(config).encoder.save_pretrained(folder)
    keys("config.json", model_type="t5", is_encoder_decoder=True)(folder)
    with pytest.raises(EncoderError, match=all_of("model type t5 has a decoder")) as refusal:
        load_encoder(str(folder))
    assert "download" not in str(refusal.value).lower()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return encoder_folder(tmp_path_factory.mktemp("plain") / "encoder")


@pytest.fixture
def alarm():
    """Ends a test that waits for a pipe or never ends."""

    def ring(*_):
        raise TimeoutError("still loading")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


TOKEN = {"id": 10**7, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
TOKEN |= {"special": True}
many_modules = modules(lambda entries: entries + [{"path": str(n), "type": "x.Normalize"} for n in range(60_000)])


def splitting(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


GROWING = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}] * 3
UNKNOWN = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 99}
HOSTILE = [
    (keys("config.json", num_attention_heads=0), "num_attention_heads = 0 must be at least 1"),
    (keys("config.json", hidden_size="32"), "hidden_size = '32' must be a number"),
    (keys("config.json", hidden_size=1.5), "StrictDataclassFieldValidationError: "),
    (keys("config.json", num_hidden_layers=10**9), "num_hidden_layers = 1000000000 must be at most 1,000"),
    (keys("config.json", num_labels=10**9), "num_labels = 1000000000 must be at most 100,000"),
    (keys("config.json", intermediate_size=10**7), "config.json describes .* weights, and its files of weights have"),
    (keys("config.json", vocab_size=10**10), "vocab_size = 10000000000 must be at most"),
    (keys("config.json", layer_norm_eps=float("inf")), "layer_norm_eps = inf must be finite"),
    (keys("config.json", model_type=["roberta"]), "cannot be loaded as an encoder: TypeError"),
    (keys("config.json", id2label=5), "cannot be loaded as an encoder: AttributeError"),
    (keys("config.json", _attn_implementation="kernels-community/x"), "names code at the hub; remove the key"),
    (keys(BERT, max_seq_length="abc"), "max_seq_length = abc; it must be a number from 1"),
    (keys(BERT, max_seq_length=-5), "max_seq_length = -5; it must be"),
    (keys(BERT, max_seq_length=1), "it takes 1 tokens, and one token with its special tokens"),
    (keys("tokenizer_config.json", model_max_length="abc"), "has model_max_length = 'abc', not a length"),
    (keys("tokenizer_config.json", model_max_length=-5), "has model_max_length = -5, not a length"),
    (text("tokenizer_config.json", "[1]"), "cannot be loaded as an encoder: AttributeError"),
    (keys(SENTENCES, default_prompt_name="p", prompts={"p": "x" * 10**6}), "its prompt has 1,000,000 characters"),
    (keys(SENTENCES, default_prompt_name="p", prompts={"p": "x" * 2**23}), "MiB; it may have 8"),
    (keys(SENTENCES, default_prompt_name="p", prompts={"p": 5}), "its prompts must be texts by name"),
    (keys(SENTENCES, default_prompt_name=["p"]), "its prompts must be texts by name"),
    (keys(POOLING, pooling_mode=5), "pooling '5' is not one of"), (many_modules, "modules.json lists 60,002 modules"),
    (pipe("config.json"), "config.json is not a file but a pipe"),
    (pipe("model.safetensors"), "model.safetensors is not a file but a pipe"),
    (pipe(POOLING), "config.json is not a file but a pipe"),
    (text("adapter_config.json", "{}"), "it is an adapter of another model"),
    (keys("tokenizer.json", added_tokens=[TOKEN]), "a token has the id 10,000,000, and the tokenizer has"),
    (keys("tokenizer.json", model=5), "cannot be loaded as an encoder: Exception: data did not match"),
    (keys("tokenizer.json", model=UNKNOWN | {"vocab": {"a": 0}}), "loaded as an encoder: .* Missing .UNK. token"),
    (keys("tokenizer.json", pre_tokenizer=splitting("(a+)+$")), "repeats a group, which may take"),
    (keys("tokenizer.json", normalizer={"type": "Sequence", "normalizers": GROWING}), "more than 256 times as long"),
    (keys("tokenizer.json", normalizer={"type": "Prepend", "prepend": "x" * 10**6}), "more than 256 times as long"),
]  # fmt: skip


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize(("change", "told"), HOSTILE, ids=[told[:40] for _, told in HOSTILE])
def test_the_file_is_named_and_nothing_is_built(plain, tmp_path, change, told):
    folder = shutil.copytree(plain, tmp_path / "encoder")
    change(folder)
    with pytest.raises(EncoderError, match=told) as error:
        load_encoder(str(folder), device="cpu")
    assert "\n" not in str(error.value)


@pytest.fixture
def run(plain, tmp_path):
    folder = tmp_path / "run"
    checkpoint.save(folder / "checkpoints", state_of(1), {ENCODER: {"x": torch.zeros(1)}})
    shutil.copytree(plain, folder / "tokenizer", ignore=lambda _, names: [n for n in names if "tokenizer" not in n])
    return folder


def scratch(**values):
    scratch = {"model_type": "roberta", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2} | values
    train = {"run": "r", "data": "d", "encoder": {"from_config": scratch}}
    return lambda folder: (folder / "config.yaml").write_text(json.dumps(train))


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize(("change", "told"), [
    (scratch(num_hidden_layers=10**9), ("num_hidden_layers = 1000000000", "at most 1,000")),
    (scratch(num_attention_heads=0), ("num_attention_heads = 0", "at least 1")),
    (scratch(intermediate_size=10**7), "config.json"), (scratch(hidden_size="32"), ("hidden_size = '32'", "number")),
    (pipe("config.yaml"), ("pipe", "device", "file")),
    (pipe("checkpoints/step-00000001/state.json"), ("pipe", "device")),
    (pipe(f"checkpoints/step-00000001/{ENCODER}"), "no complete checkpoint"),
    (pipe("tokenizer/tokenizer.json"), ("tokenizer.json", "pipe")),
])  # fmt: skip
def test_runs_are_checked_like_exports(run, change, told):
    scratch()(run)
    change(run)
    with pytest.raises(EncoderError, match=all_of(told)):
        load_encoder(str(run), device="cpu")


PATTERNS = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r" ?[^(\s|[.,!?…。，、।۔،])]+", r"<\|startoftext\|>|<\|endoftext\|>|'s|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
]  # fmt: skip


def test_tokenizers_and_large_encoders_in_use_are_within_the_bounds():
    """The patterns of GPT-2, Llama 3, GPT-4o, BLOOM and CLIP."""
    for pattern in PATTERNS:
        check_steps({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [splitting(pattern)]}})
    check_config({"hidden_size": 8192, "num_hidden_layers": 126, "num_attention_heads": 128, "rope_theta": 500_000_000})
    check_config({"vocab_size": 262_144, "max_position_embeddings": 1_048_576, "type_vocab_size": 0, "layers": [1, 2]})
    check_size(8_000_000_000, 8_000_000_000)
    with pytest.raises(DamagedError):
        check_size(2**27, 1000)


EXPONENTIAL = ["(a|aa)+$", "(?:a*){2,}b", r"(.*)\1", "((a)*)*", r"a*a*a*\d", "x" * 3000, "([)])+", "(a?){30}a{30}"]
EXPONENTIAL += ["a?" * 30, r"(a*|b)(a*|b)(a*|b)\d", r"a{0,50}a{0,50}a{0,50}\d"]


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("pattern", EXPONENTIAL)
def test_patterns_that_may_take_exponential_time(pattern):
    with pytest.raises(DamagedError, match="regular expression"):
        check_steps({"normalizer": {"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}})


E5 = {"query": "query: ", "passage": "passage: "}
PASSAGE = {"prompt_name": "passage"}
PROMPTS = {"query_prompt": "query: ", "document_prompt": "passage: "}
DOCUMENTS = ["one two three", "naïve façade", "word and more", "ab cd"]


def prompted(folder, prompts=E5, include=True, pooling="mean", **options):
    path = encoder_folder(folder, pooling=pooling, max_tokens=20, prompts=prompts, **options)
    keys("1_Pooling/config.json", include_prompt=include)(path)
    return path


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize(("prompts", "default", "query", "document"), [
    (E5, None, "query: ", "passage: "), ({"query": "query: ", "document": ""}, None, "query: ", ""),
    ({"query": "", "document": "text: ", "passage": "passage: "}, "query", "", "text: "),
    ({"corpus": "text: ", "other": "other: "}, "other", "", "text: "),
    ({"query": "", "document": ""}, None, "", ""),
    ({"other": "other: "}, "other", "other: ", "other: "),  # of every text
])  # fmt: skip
def test_roles_have_the_embeddings_of_sentence_transformers(
    tmp_path, include, pooling, prompts, default, query, document
):
    path = prompted(tmp_path / "encoder", prompts, include, pooling, default_prompt_name=default)
    encoder, theirs = load_encoder(path, device="cpu"), SentenceTransformer(str(path), device="cpu")
    close(encoder.encode(TEXTS), theirs.encode(TEXTS))
    close(in_role(encoder, "query").encode(TEXTS), theirs.encode(TEXTS, prompt=query))
    close(in_role(encoder, "document").encode(TEXTS), theirs.encode(TEXTS, prompt=document))
    close(load_encoder(path, device="cpu", role="query").encode(TEXTS), theirs.encode(TEXTS, prompt=query))
    windows, owners = embed_windows(in_role(encoder, "document"), TEXTS[:5])  # one is long
    first = np.unique(owners, return_index=True)[1]
    close(windows[first], unit_rows(in_role(encoder, "document").encode(TEXTS[:5])))
    assert in_role(encoder, "query") is in_role(encoder, "query"), "a service asks for it at every query"
    if "passage" not in prompts and "corpus" not in prompts and default is None:
        close(in_role(encoder, "document").encode(TEXTS), theirs.encode_document(TEXTS))


def test_prompts_of_the_user_replace_those_of_the_folder_and_pairs_are_scored_with_both(tmp_path, caplog):
    plain, path = prompted(tmp_path / "plain", {}), prompted(tmp_path / "encoder")
    theirs = SentenceTransformer(str(path), device="cpu")
    encoder = load_encoder(plain, device="cpu", **PROMPTS)
    close(in_role(encoder, "query").encode(TEXTS), theirs.encode_query(TEXTS))
    close(in_role(encoder, "document").encode(TEXTS), theirs.encode(TEXTS, **PASSAGE))
    assert encoder.fingerprint != load_encoder(plain, device="cpu").fingerprint
    pairs = jsonl(tmp_path / "pairs.jsonl", [{"query": text[:4], "text": text} for text in DOCUMENTS])
    scores = []
    for number, (model, prompts) in enumerate(((path, {}), (plain, PROMPTS), (plain, {}))):
        found = declutr.evaluate(model, pairs=pairs, output=tmp_path / str(number), **prompts)["pairs"]
        scores.append(list(found["scores"].values()))
    assert scores[0] == scores[1] != scores[2]
    caplog.clear()
    encoder = load_encoder(path, device="cpu")
    for _ in range(2):
        encoder.encode(["ab cd"])
    (line,) = [line for line in caplog.messages if "no prompt goes before" in line]
    says(line, "'query: '", "'passage: '")


def test_a_search_asks_with_the_prompt_of_queries_and_compares_documents_with_theirs(tmp_path, capsys):
    path = prompted(tmp_path / "encoder")
    (tmp_path / "in.txt").write_text("\n".join(DOCUMENTS) + "\n")
    output = tmp_path / "documents.npy"
    assert main(["embed", str(path), str(tmp_path / "in.txt"), "--output", str(output)]) == 0
    says(capsys.readouterr().err, "'passage: '", "before every text")
    theirs = SentenceTransformer(str(path), device="cpu")
    close(np.load(output), theirs.encode(DOCUMENTS, **PASSAGE))
    assert read_note(output).config.choice.role == "document"
    declutr.index(output, tmp_path / "index")
    cosines = cos_sim(theirs.encode(DOCUMENTS, **PASSAGE), theirs.encode_query(["two words"])).numpy()[:, 0]
    hits = declutr.search(tmp_path / "index", "two words")
    assert [hit.text for hit in hits] == [DOCUMENTS[place] for place in np.argsort(-cosines)]
    close([hit.cosine for hit in hits], np.sort(cosines)[::-1])


def test_embed_takes_the_role_that_it_is_told_and_an_index_keeps_the_users_prompt_of_queries(tmp_path, capsys):
    path, plain, source = prompted(tmp_path / "encoder"), prompted(tmp_path / "plain", {}), tmp_path / "in.txt"
    source.write_text("\n".join(DOCUMENTS) + "\n")
    theirs = SentenceTransformer(str(path), device="cpu")
    for role, prompt in (("query", "query: "), ("document", "passage: ")):
        declutr.embed(path, source, tmp_path / f"{role}.npy", role=role)
        close(np.load(tmp_path / f"{role}.npy"), theirs.encode([f"{prompt}{text}" for text in DOCUMENTS]))
    capsys.readouterr()
    assert main(["embed", str(plain), str(source), "--output", str(tmp_path / "o.npy"), "--role", "query"]) == 0
    says(capsys.readouterr().err, "--role query: has no effect", "declares no prompts")
    declutr.embed(plain, source, tmp_path / "d.npy", **PROMPTS)
    declutr.index(tmp_path / "d.npy", tmp_path / "index")
    hit = declutr.search(tmp_path / "index", "ab cd", 1)[0]
    plain = SentenceTransformer(str(plain), device="cpu")
    close(hit.cosine, cos_sim(*plain.encode(["query: ab cd", f"passage: {hit.text}"])).item())


def test_a_graph_has_the_prompts_of_its_encoder(tmp_path):
    pytest.importorskip("onnxruntime")
    path = prompted(tmp_path / "encoder")
    declutr.export(path, tmp_path / "graph", to="onnx")
    graph, theirs = load_encoder(tmp_path / "graph"), SentenceTransformer(str(path), device="cpu")
    close(in_role(graph, "query").encode(TEXTS), theirs.encode_query(TEXTS))
    close(in_role(graph, "document").encode(TEXTS), theirs.encode(TEXTS, **PASSAGE))
    found, expected = (embed_windows(in_role(e, "document"), TEXTS) for e in (graph, load_encoder(path, device="cpu")))
    assert found[1].tolist() == expected[1].tolist()
    assert len(found[1]) > len(TEXTS), "a long text has windows"
    np.testing.assert_allclose(found[0], expected[0], atol=1e-4, rtol=0)
    assert json.loads((tmp_path / "graph" / "declutr_onnx.json").read_text())["prompts"] == E5


@pytest.mark.parametrize(("name", "options", "words"), [
    ("hashed-words:8", {"query_prompt": "q: "}, ("--query-prompt 'q: '", "no effect", "hashed words")),
    ("folder", {"query_prompt": "x" * 20_000}, ("query_prompt", "16384 characters")),
    ("unpooled", {"long_texts": "windows", "role": "query"}, ("leaves its prompt out", "long_texts = cut")),
    ("unpooled", {"max_tokens": 4, "role": "query"}, ("its prompt fills the 4 tokens",)),
])  # fmt: skip
def test_prompts_that_cannot_be_applied_are_refused(tmp_path, name, options, words):
    path = name if ":" in name else prompted(tmp_path / "encoder", include=name != "unpooled")
    with pytest.raises((ConfigError, EncoderError), match=all_of(*words)):
        load_encoder(path, device="cpu", **options).encode(["one two three four five six seven eight nine ten " * 3])
