"""An encoder with wrong weights or a damaged file gets no score; hostile ones that ask for endless time are refused."""

import json
import os
import shutil
import signal
import time

import numpy as np
import pytest
import tinyruns as runs
import torch
from folders import TEXTS, encoder_folder, write
from huggingface_hub import constants
from messages import all_of
from safetensors.torch import load_file, save_file
from sentevalsets import write_sets
from states import state_of
from tinyruns import write_config
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertForPreTraining

from declutr.cli.main import main
from declutr.common.errors import DamagedError, EncoderError
from declutr.common.storage import write_json
from declutr.encoders.loading import load_encoder
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import ENCODER, checkpoint_path
from declutr.trainer.model.bounds import check_config, check_size, check_steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return encoder_folder(tmp_path_factory.mktemp("whole") / "encoder", after=["Dense"])


@pytest.fixture
def folder(whole, tmp_path):
    """A copy to damage."""
    for path in whole.rglob("*"):
        if path.is_file():
            (target := tmp_path / "encoder" / path.relative_to(whole)).parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return tmp_path / "encoder"


def keys(file, **values):
    """Sets these keys of a file of settings."""

    def change(folder):
        found = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps(found | values))

    return change


def keep(path, chosen):
    save_file({key: value for key, value in load_file(path).items() if chosen(key)}, path, metadata={"format": "pt"})


def dense(folder, size):
    """Makes the dense layer take another size, with weights that agree."""
    keys("2_Dense/config.json", in_features=size)(folder)
    weights = {"linear.weight": torch.zeros(12, size), "linear.bias": torch.zeros(12)}
    save_file(weights, folder / "2_Dense/model.safetensors")


def pickled(folder, weights):
    """Stores the dense layer's weights in the older format."""
    (folder / "2_Dense/model.safetensors").unlink()
    torch.save(weights, folder / "2_Dense/pytorch_model.bin")


def module(folder, path):
    """Adds a dense layer at the end."""
    entries = json.loads((folder / "modules.json").read_text())
    write(
        folder / "modules.json",
        [*entries, {"idx": 3, "name": "3", "path": path, "type": "sentence_transformers.models.Dense"}],
    )


NORM = "encoder.layer.1.attention.output.LayerNorm.bias"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: keep(f / "model.safetensors", lambda key: "layer.1." not in key), ("16 weights", NORM, "13 more")),
        (
            lambda f: keep(f / "model.safetensors", lambda key: "word_embeddings" not in key),
            ("1 weight", "embeddings.word_embeddings.weight"),
        ),
        (keys("config.json", num_hidden_layers=1), ("config.json", "16 weights", NORM)),
        (
            keys("config.json", intermediate_size=50),
            ("config.json", "shape", "6 weights", "encoder.layer.0.intermediate.dense.bias", "(48,)"),
        ),
        (
            lambda f: save_file({f"module.{key}": value for key, value in load_file(f / "model.safetensors").items()},
                                f / "model.safetensors", metadata={"format": "pt"}),
            ("37 weights", "module.embeddings.LayerNorm.bias"),
        ),
        (lambda f: keep(f / "2_Dense/model.safetensors", lambda key: "bias" not in key), "2_Dense/model.safetensors"),
        (keys("2_Dense/config.json", out_features=13), ("2_Dense/model.safetensors", "size mismatch")),
        (
            keys("2_Dense/config.json", out_features=2**30),  # 128 GiB
            ("2_Dense/model.safetensors", "size mismatch"),
        ),
        (keys("2_Dense/config.json", out_features=10**30), "numbers from 1"),
        (keys("2_Dense/config.json", in_features="32"), ("in_features", "out_features", "'32' and 12")),
        (keys("2_Dense/config.json", activation_function=["x"]), ("dense layer with", "supported are")),
        (lambda f: dense(f, 7), ("first dense layer", "7 numbers", "32")),
        (lambda f: pickled(f, [1, 2]), ("2_Dense/pytorch_model.bin", "tensors")),
        (lambda f: pickled(f, {"weight": 3}), ("2_Dense/pytorch_model.bin", "tensors")),
        (lambda f: module(f, "2_Dense"), ("2_Dense", "32 numbers", "12")),
        (lambda f: module(f, "../whole/2_Dense"), ("../whole/2_Dense", "outside")),
        (lambda f: (f / "2_Dense/config.json").unlink(), ("2_Dense/config.json", "missing")),
        (lambda f: (f / "1_Pooling/config.json").unlink(), ("1_Pooling/config.json", "missing")),
        (lambda f: (f / "modules.json").unlink(), "modules.json"),
        (lambda f: write(f / "modules.json", {"a": 1}), ("modules.json", "damaged")),
        (lambda f: write(f / "1_Pooling/config.json", ["mean"]), ("config.json", "damaged", "array")),
    ],
)  # fmt: skip
def test_incomplete_encoder_is_refused_by_name(folder, damage, message):
    damage(folder)
    with pytest.raises(EncoderError, match=all_of(message)):
        load_encoder(str(folder), device="cpu")


@pytest.mark.parametrize("share", [0, 0.5, 0.98])
@pytest.mark.parametrize(
    "file",
    ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "modules.json",
     "sentence_bert_config.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"],
)  # fmt: skip
def test_a_half_downloaded_file_is_named(folder, file, share):
    path = folder / file
    path.write_bytes(path.read_bytes().rstrip()[: int(share * path.stat().st_size) - (share > 0.9)])
    with pytest.raises(EncoderError, match=file.rpartition("/")[2]):
        load_encoder(str(folder), device="cpu")


def test_a_half_downloaded_file_of_the_older_format_is_named(folder):
    path = folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), path)
    (folder / "model.safetensors").unlink()
    load_encoder(str(folder), device="cpu")
    whole = path.read_bytes()
    for share in (0, 0.5, 0.98):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(EncoderError, match=all_of("pytorch_model.bin", "damaged", "downloaded")):
            load_encoder(str(folder), device="cpu")


def test_heads_are_left_out_and_said(folder, tmp_path):
    """A checkpoint of BERT's pretraining: heads that no embedding is made of, and a pooler."""
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    path = tmp_path / "bert"
    BertForPreTraining(AutoConfig.for_model("bert", vocab_size=300, **settings)).save_pretrained(path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(path)
    found = load_encoder(str(path), device="cpu")
    assert found.unused == ("cls (7 weights)", "pooler (2 weights)")
    close = AutoModel.from_pretrained(path).eval()
    ids = found.tokenizer(["ab cd"], return_tensors="pt")
    expected = close(ids["input_ids"]).last_hidden_state.mean(1)
    np.testing.assert_allclose(found.encode(["ab cd"]), expected.detach().numpy(), atol=1e-5)
    assert load_encoder(str(folder)).unused == ("pooler (2 weights)",)


@pytest.mark.parametrize("family", ["mpnet", "albert", "deberta-v2", "electra", "distilbert", "modernbert"])
def test_a_missing_pooler_changes_nothing(tmp_path, family):
    path = encoder_folder(tmp_path / family, family)
    keep(path / "model.safetensors", lambda key: not key.startswith("pooler."))
    first, again = (load_encoder(str(path), device="cpu") for _ in range(2))
    assert first.fingerprint == again.fingerprint
    assert first.encode(TEXTS[:5]).tobytes() == again.encode(TEXTS[:5]).tobytes()


def test_a_hub_that_does_not_answer_is_said_within_five_seconds(monkeypatch):
    """An address that takes no connection (TEST-NET-1)."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://192.0.2.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    begun = time.monotonic()
    for name in ("some/encoder", "another"):
        with pytest.raises(EncoderError, match=all_of("http://192.0.2.1", "not")):
            load_encoder(name)
    assert time.monotonic() - begun < 5


def test_a_copied_run_says_that_its_shards_are_not_here(tmp_path, capsys):
    run = tmp_path / "copy"
    step = checkpoint_path(run / "checkpoints", 8)
    step.mkdir(parents=True)
    (step / ENCODER).write_bytes(b"")
    state = state_of(8).model_copy(update={"files": {ENCODER: "0" * 64}, "sizes": {ENCODER: 0}})
    write_json(step / "state.json", state.model_dump(mode="json"))
    config = runs.train_config(tmp_path / "data of another machine", run)
    write_config(run / "config.yaml", **config.model_dump(mode="json"))
    with pytest.raises(EncoderError, match=all_of("data of another machine'", "config.yaml", "tokenizer")):
        load_encoder(str(step))
    sets = write_sets(tmp_path / "sets", rows=12)
    given = ["--data", str(sets), "--allow-unchecked", "--tasks", "STSBenchmark", "--output", str(tmp_path / "scores")]
    assert main(["evaluate", str(run), *given]) == 1
    said = capsys.readouterr().err
    assert said.count("a folder with") == 1
    assert "Repo id" not in said


def test_an_export_knows_what_it_started_from(folder):
    assert load_encoder(str(folder)).pretrained == ""
    write(folder / "declutr.json", {"step": 1, "config": {"encoder": {"pretrained": "some/encoder"}}})
    assert load_encoder(str(folder)).pretrained == "some/encoder"
    write(folder / "declutr.json", {"step": 1, "config": {"encoder": {"pretrained": "(a path)"}}})
    assert load_encoder(str(folder)).pretrained == ""
    (folder.parent / "config.yaml").write_text("encoder: {pretrained: /start}")  # of the run in which it still is
    assert load_encoder(str(folder)).pretrained == "/start"
    (folder.parent / "config.yaml").unlink()
    write(folder / "declutr.json", ["of others"])
    assert load_encoder(str(folder)).pretrained == ""


@pytest.mark.parametrize("name", ["/gone", "./gone", "runs/mine/export"])
def test_a_path_is_no_name_of_the_hub(name):
    with pytest.raises(EncoderError, match="no such folder"):
        load_encoder(name)


def test_weights_that_are_not_finite_stay_an_error_of_the_embeddings(folder):
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.LayerNorm.weight"] = torch.full((32,), torch.nan)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert np.isnan(load_encoder(str(folder), device="cpu").encode(["ab"])).any()


TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
SENTENCES = "config_sentence_transformers.json"


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


def pipe(name):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def added(number):
    def change(folder):
        found = json.loads((folder / "tokenizer.json").read_text())
        found["added_tokens"].append({"id": number, "content": "<x>", **TOKEN})
        (folder / "tokenizer.json").write_text(json.dumps(found))

    return change


def many_modules(folder):
    found = json.loads((folder / "modules.json").read_text())
    found += [{"path": str(n), "type": "x.Normalize"} for n in range(60_000)]
    (folder / "modules.json").write_text(json.dumps(found))


def splitting(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


GROWING = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}] * 3
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
    (keys("sentence_bert_config.json", max_seq_length="abc"), "max_seq_length = abc; it must be a number from 1"),
    (keys("sentence_bert_config.json", max_seq_length=-5), "max_seq_length = -5; it must be"),
    (keys("sentence_bert_config.json", max_seq_length=1), "it takes 1 tokens, and one token with its special tokens"),
    (keys("tokenizer_config.json", model_max_length="abc"), "has model_max_length = 'abc', not a length"),
    (keys("tokenizer_config.json", model_max_length=-5), "has model_max_length = -5, not a length"),
    (text("tokenizer_config.json", "[1]"), "cannot be loaded as an encoder: AttributeError"),
    (keys(SENTENCES, default_prompt_name="p", prompts={"p": "x" * 10**6}), "its prompt has 1,000,000 characters"),
    (keys(SENTENCES, default_prompt_name="p", prompts={"p": "x" * 2**23}), "MiB; it may have 8"),
    (keys(SENTENCES, default_prompt_name="p", prompts={"p": 5}), "its prompts must be texts by name"),
    (keys(SENTENCES, default_prompt_name=["p"]), "its prompts must be texts by name"),
    (keys("1_Pooling/config.json", pooling_mode=5), "pooling '5' is not one of"),
    (many_modules, "modules.json lists 60,002 modules"),
    (pipe("config.json"), "config.json is not a file but a pipe"),
    (pipe("model.safetensors"), "model.safetensors is not a file but a pipe"),
    (pipe("1_Pooling/config.json"), "config.json is not a file but a pipe"),
    (text("adapter_config.json", "{}"), "it is an adapter of another model"),
    (added(10**7), "a token has the id 10,000,000, and the tokenizer has"),
    (keys("tokenizer.json", model=5), "cannot be loaded as an encoder: Exception: data did not match"),
    (keys("tokenizer.json", pre_tokenizer=splitting("(a+)+$")), "repeats a group, which may take"),
    (keys("tokenizer.json", normalizer={"type": "Sequence", "normalizers": GROWING}), "more than 256 times as long"),
    (keys("tokenizer.json", normalizer={"type": "Prepend", "prepend": "x" * 10**6}), "more than 256 times as long"),
]


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
    """A run with the tokenizer and one checkpoint of random size."""
    folder = tmp_path / "run"
    checkpoint.save(folder / "checkpoints", state_of(1), {ENCODER: {"x": torch.zeros(1)}})
    shutil.copytree(plain, folder / "tokenizer", ignore=lambda _, names: [n for n in names if "tokenizer" not in n])
    return folder


def scratch(**values):
    scratch = {"model_type": "roberta", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2} | values
    train = {"run": "r", "data": "d", "encoder": {"from_config": scratch}}
    return lambda folder: (folder / "config.yaml").write_text(json.dumps(train))


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (scratch(num_hidden_layers=10**9), ("num_hidden_layers = 1000000000", "at most 1,000")),
        (scratch(num_attention_heads=0), ("num_attention_heads = 0", "at least 1")),
        (scratch(intermediate_size=10**7), "config.json"),
        (scratch(hidden_size="32"), ("hidden_size = '32'", "number")),
        (pipe("config.yaml"), ("pipe", "device", "file")),
        (pipe("checkpoints/step-00000001/state.json"), ("pipe", "device")),
        (pipe(f"checkpoints/step-00000001/{ENCODER}"), "no complete checkpoint"),
        (pipe("tokenizer/tokenizer.json"), ("tokenizer.json", "pipe")),
    ],
)
def test_runs_are_checked_like_exports(run, change, told):
    scratch()(run)
    change(run)
    with pytest.raises(EncoderError, match=all_of(told)):
        load_encoder(str(run), device="cpu")


PATTERNS = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"<\|startoftext\|>|<\|endoftext\|>|'s|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
]


def test_tokenizers_in_use_are_within_the_bounds():
    """The patterns of GPT-2, Llama 3, GPT-4o, BLOOM and CLIP."""
    for pattern in PATTERNS:
        check_steps({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [splitting(pattern)]}})


EXPONENTIAL = ["(a|aa)+$", "(?:a*){2,}b", r"(.*)\1", "((a)*)*", r"a*a*a*\d", "x" * 3000, "([)])+", "(a?){30}a{30}"]
EXPONENTIAL += ["a?" * 30, r"(a*|b)(a*|b)(a*|b)\d", r"a{0,50}a{0,50}a{0,50}\d"]


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("pattern", EXPONENTIAL)
def test_patterns_that_may_take_exponential_time(pattern):
    with pytest.raises(DamagedError, match="regular expression"):
        check_steps({"normalizer": {"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}})


def test_large_encoders_in_use_are_within_the_bounds():
    check_config({"hidden_size": 8192, "num_hidden_layers": 126, "num_attention_heads": 128, "rope_theta": 500_000_000})
    check_config({"vocab_size": 262_144, "max_position_embeddings": 1_048_576, "type_vocab_size": 0, "layers": [1, 2]})
    check_size(8_000_000_000, 8_000_000_000)
    with pytest.raises(DamagedError):
        check_size(2**27, 1000)
