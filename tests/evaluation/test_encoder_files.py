"""Encoders whose files are damaged, hostile or not what they seem are refused; what the files declare is computed."""

import json
import time

import numpy as np
import pytest
import tinyruns as runs
import torch
from encoderfiles import DENSE, POOLING, SENTENCES, WEIGHTS, keys, modules, remove, text
from folders import TEXTS, encoder_folder, module, write
from huggingface_hub import constants
from messages import all_of
from safetensors.torch import load_file, save_file
from sentevaldata import write_sets
from tinyruns import state_of, write_config
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertForPreTraining

from declutr.cli.main import main
from declutr.common.errors import EncoderError
from declutr.common.storage import write_json
from declutr.encoders.loading import load_encoder
from declutr.trainer.checkpoints.checkpoint import ENCODER, checkpoint_path


def retype(place, kind):
    return modules(lambda entries: entries[place].update(type=kind))


def dense_at_end(path):
    return modules(lambda entries: [*entries, module("Dense", path, 3)])


def keep(path, chosen, prefix=""):
    tensors = {f"{prefix}{key}": value for key, value in load_file(path).items() if chosen(key)}
    save_file(tensors, path, metadata={"format": "pt"})


def dense(folder, size):
    keys("2_Dense/config.json", in_features=size)(folder)
    weights = {"linear.weight": torch.zeros(12, size), "linear.bias": torch.zeros(12)}
    save_file(weights, folder / "2_Dense/model.safetensors")


def pickled(folder, weights):
    (folder / "2_Dense/model.safetensors").unlink()
    torch.save(weights, folder / "2_Dense/pytorch_model.bin")


def empty_vocabulary(folder):
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["model"] |= {"vocab": {}, "merges": []}
    write(folder / "tokenizer.json", settings)


def added_tokens(number):
    def change(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens([f"<new{place}>" for place in range(number)])
        tokenizer.save_pretrained(folder)

    return change


def rows_of_table(folder):
    model = AutoModel.from_pretrained(folder)
    model.resize_token_embeddings(100)
    model.save_pretrained(folder)


NORM = "encoder.layer.1.attention.output.LayerNorm.bias"


@pytest.mark.parametrize(("damage", "message"), [
    (lambda f: keep(f / "model.safetensors", lambda key: "layer.1." not in key), ("16 weights", NORM, "13 more")),
    (lambda f: keep(f / "model.safetensors", lambda key: "word_embeddings" not in key),
     ("1 weight", "embeddings.word_embeddings.weight")),
    (keys("config.json", num_hidden_layers=1), ("config.json", "16 weights", NORM)),
    (keys("config.json", intermediate_size=50),
     ("config.json", "shape", "6 weights", "encoder.layer.0.intermediate.dense.bias", "(48,)")),
    (lambda f: keep(f / "model.safetensors", bool, "module."), ("37 weights", "module.embeddings.LayerNorm.bias")),
    (lambda f: keep(f / WEIGHTS, lambda key: "bias" not in key), WEIGHTS),
    (keys(DENSE, out_features=13), (WEIGHTS, "size mismatch")),
    (keys(DENSE, out_features=2**30), (WEIGHTS, "size mismatch")),  # 128 GiB
    (keys(DENSE, out_features=10**30), "numbers from 1"),
    (keys(DENSE, in_features="32"), ("in_features", "out_features", "'32' and 12")),
    (keys(DENSE, activation_function=["x"]), ("dense layer with", "supported are")),
    (keys(DENSE, activation_function="mine.Act"), (DENSE, "mine.Act", "supported are", "Tanh")),
    (lambda f: dense(f, 7), ("first dense layer", "7 numbers", "32")),
    (lambda f: pickled(f, [1, 2]), ("2_Dense/pytorch_model.bin", "tensors")),
    (lambda f: pickled(f, {"weight": 3}), ("2_Dense/pytorch_model.bin", "tensors")),
    (dense_at_end("2_Dense"), ("2_Dense", "32 numbers", "12")),
    (dense_at_end("../whole/2_Dense"), ("../whole/2_Dense", "outside")),
    (remove(DENSE), (DENSE, "missing")), (remove(POOLING), (POOLING, "missing")),
    (remove("modules.json"), "modules.json"), (remove("config.json"), ("config.json is missing", "download it again")),
    (remove("model.safetensors"), ("holds no weights", "model.safetensors", "download it again")),
    (text("modules.json", '{"a": 1}'), ("modules.json", "damaged")),
    (text(POOLING, '["mean"]'), ("config.json", "damaged", "array")),
    (remove("*token*"), ("no file of a tokenizer", "tokenizer.json", "copy them")),
    (remove("tokenizer.json", "vocab.json", "merges.txt"), ("vocabulary of a tokenizer", "copy it")),
    (empty_vocabulary, ("vocabulary of its tokenizer is empty", "copy")),
    (added_tokens(1), ("'<new0>'", "table of embeddings")), (added_tokens(500), ("'<new499>'", "table of embeddings")),
    (rows_of_table, ("table of embeddings has 100 rows",)),
    (retype(0, "custom_st.Transformer"), ("custom_st.Transformer", "Python code of its own")),
    (retype(1, "mine.models.Pooling"), ("mine.models.Pooling", "Python code of its own")),
    (retype(2, "sentence_transformers_x.Dense"), ("sentence_transformers_x.Dense", "Python code")),
    (text("modules.json", '[{"type": "my.StaticEmbedding", "path": ""}]'), ("my.StaticEmbedding", "Python code")),
    (modules(lambda _: [module(kind, "") for kind in ("Transformer", "WordWeights")]), "WordWeights"),
    (keys("config.json", auto_map={"AutoModel": "m.Model"}), ("config.json", "auto_map", "--trust-remote-code")),
    (keys("tokenizer_config.json", auto_map={"AutoTokenizer": ["tokens.Own", None]}),
     ("tokenizer_config.json", "auto_map", "--trust-remote-code")),
    (keys(SENTENCES, truncate_dim="8"), ("truncate_dim = 8", "number from 1")),
    (keys(SENTENCES, truncate_dim=0), ("truncate_dim = 0",)),
    (keys(SENTENCES, default_prompt_name="query"),
     ("default_prompt_name = query", "prompts are none", "remove it")),
    (keys(POOLING, pooling_mode="lasttoken"), ("lasttoken", "take another encoder")),
    (text(POOLING, '{"pooling_mode_lasttoken": true}'), "lasttoken"),
    (keys(POOLING, pooling_mode=["mean", "max"]), "mean+max"),
])  # fmt: skip
def test_encoder_that_is_incomplete_or_not_what_it_seems_is_refused_by_name(folder, damage, message):
    damage(folder)
    with pytest.raises(EncoderError, match=all_of(message)) as refusal:
        load_encoder(str(folder), device="cpu")
    assert "--pooling" not in str(refusal.value)


@pytest.mark.parametrize("share", [0, 0.5, 0.98])
@pytest.mark.parametrize(
    "file",
    ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "modules.json",
     "sentence_bert_config.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors",
     "pytorch_model.bin"],
)  # fmt: skip
def test_a_half_downloaded_file_is_named(folder, file, share):
    path, facts = folder / file, [file.rpartition("/")[2]]
    if file == "pytorch_model.bin":  # the older format
        torch.save(load_file(folder / "model.safetensors"), path)
        (folder / "model.safetensors").unlink()
        load_encoder(str(folder), device="cpu")
        facts += ["damaged", "downloaded", "download it again"]
    elif file == "model.safetensors" and share == 0.98:
        facts += ["shorter than its header says", "download it again"]
    path.write_bytes(path.read_bytes().rstrip()[: int(share * path.stat().st_size) - (share > 0.9)])
    with pytest.raises(EncoderError, match=all_of(facts)):
        load_encoder(str(folder), device="cpu")


def test_heads_are_left_out_and_said(folder, tmp_path):
    """A checkpoint of BERT's pretraining: heads that no embedding is made of, and a pooler."""
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    path = tmp_path / "bert"
    BertForPreTraining(AutoConfig.for_model("bert", vocab_size=300, **settings)).save_pretrained(path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(path)
    found = load_encoder(str(path), device="cpu")
    assert found.unused == ("cls (7 weights)", "pooler (2 weights)")
    ids = found.tokenizer(["ab cd"], return_tensors="pt")["input_ids"]
    expected = AutoModel.from_pretrained(path).eval()(ids).last_hidden_state.mean(1)
    np.testing.assert_allclose(found.encode(["ab cd"]), expected.detach().numpy(), atol=1e-5)
    assert load_encoder(str(folder)).unused == ("pooler (2 weights)",)


@pytest.mark.parametrize("family", ["mpnet", "albert", "deberta-v2", "electra", "distilbert", "modernbert"])
def test_a_missing_pooler_changes_nothing(tmp_path, family):
    path = encoder_folder(tmp_path / family, family)
    keep(path / "model.safetensors", lambda key: not key.startswith("pooler."))
    first, again = (load_encoder(str(path), device="cpu") for _ in range(2))
    assert first.fingerprint == again.fingerprint
    assert first.encode(TEXTS[:5]).tobytes() == again.encode(TEXTS[:5]).tobytes()


def test_a_hub_that_does_not_answer_is_said_within_five_seconds_and_a_path_is_no_name_of_it(tmp_path, monkeypatch):
    """An address that takes no connection (TEST-NET-1)."""
    monkeypatch.chdir(tmp_path)  # a user's checkout may have such a run
    for name in ("/gone", "./gone", "runs/mine/export"):
        with pytest.raises(EncoderError, match="no such folder"):
            load_encoder(name)
    monkeypatch.setattr(constants, "ENDPOINT", "http://192.0.2.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    begin = time.monotonic()
    for name in ("some/encoder", "another"):
        with pytest.raises(EncoderError, match=all_of("http://192.0.2.1", "not")):
            load_encoder(name)
    assert time.monotonic() - begin < 5


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
    for facts, of_run, start in (
        ({"step": 1, "config": {"encoder": {"pretrained": "some/encoder"}}}, None, "some/encoder"),
        ({"step": 1, "config": {"encoder": {"pretrained": "(a path)"}}}, None, ""),
        ({"step": 1, "config": {"encoder": {"pretrained": "(a path)"}}}, "/start", "/start"),  # in which it still is
        (["of others"], None, ""),
    ):
        write(folder / "declutr.json", facts)
        (folder.parent / "config.yaml").unlink(missing_ok=True)
        if of_run:
            (folder.parent / "config.yaml").write_text(f"encoder: {{pretrained: {of_run}}}")
        assert load_encoder(str(folder)).pretrained == start


def test_weights_that_are_not_finite_stay_an_error_of_the_embeddings(folder):
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.LayerNorm.weight"] = torch.full((32,), torch.nan)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert np.isnan(load_encoder(str(folder), device="cpu").encode(["ab"])).any()
