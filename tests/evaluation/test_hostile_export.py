"""Encoders from someone else whose files ask for endless time or memory, or hold what no program writes."""

import json
import os
import shutil
import signal

import pytest
import torch
from folders import encoder_folder
from messages import all_of

from declutr.common.errors import DamagedError, EncoderError
from declutr.encoders.loading import load_encoder
from declutr.trainer.checkpoints.checkpoint import ENCODER
from declutr.trainer.checkpoints.tensorfile import write_tensors
from declutr.trainer.model.bounds import check_config, check_size, check_steps

TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
SENTENCES = "config_sentence_transformers.json"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return encoder_folder(tmp_path_factory.mktemp("plain") / "encoder")


@pytest.fixture(autouse=True)
def alarm():
    """Ends a test that waits for a pipe or never ends."""

    def ring(*_):
        raise TimeoutError("still loading")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def keys(file, **values):
    def change(folder):
        found = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps(found | values))

    return change


def tokenizer(**values):
    return keys("tokenizer.json", **values)


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


GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}
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
    (tokenizer(model=5), "cannot be loaded as an encoder: Exception: data did not match"),
    (tokenizer(pre_tokenizer=splitting("(a+)+$")), "repeats a group, which may take"),
    (tokenizer(normalizer={"type": "Sequence", "normalizers": [GROWING] * 3}), "more than 256 times as long"),
    (tokenizer(normalizer={"type": "Prepend", "prepend": "x" * 10**6}), "more than 256 times as long"),
]


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
    point = folder / "checkpoints/step-00000001"
    point.mkdir(parents=True)
    files = {ENCODER: write_tensors(point / ENCODER, {"x": torch.zeros(1)})}
    state = {"step": 1, "documents": 1, "world_size": 1, "config_hash": "", "data_hash": "", "files": files}
    sizes = {ENCODER: (point / ENCODER).stat().st_size}
    (point / "state.json").write_text(json.dumps(state | {"sizes": sizes, "scores": {}, "skipped": 0}))
    shutil.copytree(plain, folder / "tokenizer", ignore=lambda _, names: [n for n in names if "tokenizer" not in n])
    return folder


def scratch(**values):
    scratch = {"model_type": "roberta", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2} | values
    train = {"run": "r", "data": "d", "encoder": {"from_config": scratch}}
    return lambda folder: (folder / "config.yaml").write_text(json.dumps(train))


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


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|aa)+$",
        "(?:a*){2,}b",
        r"(.*)\1",
        "((a)*)*",
        r"a*a*a*\d",
        "x" * 3000,
        "([)])+",
        "(a?){30}a{30}",
        "a?" * 30,
        r"(a*|b)(a*|b)(a*|b)\d",
        r"a{0,50}a{0,50}a{0,50}\d",
    ],
)
def test_patterns_that_may_take_exponential_time(pattern):
    with pytest.raises(DamagedError, match="regular expression"):
        check_steps({"normalizer": {"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}})


def test_large_encoders_in_use_are_within_the_bounds():
    check_config({"hidden_size": 8192, "num_hidden_layers": 126, "num_attention_heads": 128, "rope_theta": 500_000_000})
    check_config({"vocab_size": 262_144, "max_position_embeddings": 1_048_576, "type_vocab_size": 0, "layers": [1, 2]})
    check_size(8_000_000_000, 8_000_000_000)
    with pytest.raises(DamagedError):
        check_size(2**27, 1000)
