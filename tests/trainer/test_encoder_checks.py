"""What is known of an encoder and a run's folder before Ray starts; layers behind the pooling of an export."""

import json
import shutil

import numpy as np
import pytest
import tinyruns as runs
import torch
from families import PADDED
from madeup import config_of, shards
from mediafiles import png
from messages import says
from preparing import prepare_media
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from tinyruns import problems, state_of
from torch import nn
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertForPreTraining, BertModel, ViTConfig, ViTModel

from declutr.encoders.loading import load_encoder
from declutr.pipeline.shards.manifest import data_hash, load_manifest
from declutr.trainer.build import build_encoder, build_objective, used_parameters
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.state import joint_hash
from declutr.trainer.config import TrainConfig
from declutr.trainer.data.batches import SpanBatch
from declutr.trainer.driver.export import write_encoder
from declutr.trainer.model.behind import Dense, Normalize, write_steps
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.step.task import TrainTask

SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
WEIGHT = "bert.encoder.layer.1.output.dense.weight"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return runs.word_shards(tmp_path_factory.mktemp("data") / "out")


@pytest.fixture
def pretrained(data, tmp_path):
    """Saves a tiny pretrained encoder of a class with the shards' tokenizer; a function may change its weights."""

    def save(kind, change=None):
        folder = tmp_path / "pretrained"
        tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
        config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=40, pad_token_id=1, **SHAPE)
        kind(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if change:
            weights = load_file(folder / "model.safetensors")
            change(weights)
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return save


def given(data, tmp_path, encoder, **changes) -> TrainConfig:
    values = runs.train_values(data, tmp_path / "run", **{"batch_documents": 16} | changes)
    return TrainConfig.model_validate(values | {"encoder": {"dropout": 0.0, **encoder}})


def test_encoder_without_a_head_is_refused(data, tmp_path, pretrained, log):
    """Random weights are refused by name where the MLM loss would train through them, unless they are asked for."""
    encoder = {"pretrained": str(pretrained(BertModel))}
    (problem,) = problems(given(data, tmp_path, encoder))
    says(problem, f"encoder.pretrained = {encoder['pretrained']}", "no MLM head")
    assert "cls.predictions.transform.dense.weight" in problem
    assert "objective.terms=contrastive" in problem
    assert "encoder.new_mlm_head=true" in problem
    assert problems(given(data, tmp_path, encoder, objective={"terms": "contrastive"})) == []
    assert problems(given(data, tmp_path, encoder | {"new_mlm_head": True})) == []
    assert len(problems(given(data, tmp_path, encoder, objective={"terms": "mlm"}))) == 1
    assert log == []
    (tmp_path / "run" / "checkpoints" / "step-00000002").mkdir(parents=True)
    assert problems(given(data, tmp_path, encoder)) == [], "a run's checkpoints hold its head"


def test_a_new_head_follows_from_the_seed(data, tmp_path, pretrained):
    encoder = {"pretrained": str(pretrained(BertModel)), "new_mlm_head": True}
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    one, again, other = (
        build_encoder(given(data, tmp_path, encoder, seed=seed), tokenizer).model.cls.predictions.transform.dense.weight
        for seed in (0, 0, 1)
    )
    assert one.equal(again)
    assert not one.equal(other)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda weights: weights.pop(WEIGHT), WEIGHT),
        (lambda weights: [weights.pop(name) for name in list(weights) if ".layer.1." in name], "10 more"),
        (lambda weights: weights.update({WEIGHT: weights[WEIGHT][:5].clone()}), (f"{WEIGHT}", "[5, 24]", "[16")),
    ],
    ids=["a weight", "a layer", "another shape"],
)
@pytest.mark.parametrize("terms", ["both", "contrastive"])
def test_incomplete_encoder_is_refused_with_its_weights(data, tmp_path, pretrained, change, named, terms):
    encoder = {"pretrained": str(pretrained(BertForMaskedLM, change)), "new_mlm_head": True}
    (problem,) = problems(given(data, tmp_path, encoder, objective={"terms": terms}))
    says(problem, "lack weights", "random")
    says(problem, named)


def test_truncated_encoder_file_is_refused(data, tmp_path, pretrained):
    folder = pretrained(BertForMaskedLM)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (problem,) = problems(given(data, tmp_path, {"pretrained": str(folder)}))
    assert problem.startswith(f"encoder = {folder}: ")
    assert "not fully covered" in problem


def test_unused_weights_are_logged_once(data, tmp_path, pretrained, log, capfd):
    """Weights without a place are named; those of heads that every published encoder brings are not."""
    folder = pretrained(BertForPreTraining)
    assert problems(given(data, tmp_path, {"pretrained": str(folder)})) == []
    assert log == []
    pretrained(BertForMaskedLM, lambda weights: weights.update({"bert.adapter.weight": weights[WEIGHT].clone()}))
    assert problems(given(data, tmp_path, {"pretrained": str(folder)})) == []
    (line,) = log
    says(line, f"encoder.pretrained = {folder}", "unused weights", "bert.adapter.weight")
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("kinds", "pooling", "told"),
    [
        (("Transformer", "Pooling", "Normalize"), {"pooling_mode_mean_tokens": True}, ()),
        (("Transformer", "Pooling"), {"pooling_mode": "mean"}, ()),
        (("Transformer", "Pooling", "LSTM"), {"pooling_mode": "mean"}, ("module LSTM",)),
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True}, ("encoder.pooling = mean",)),
    ],
)
def test_modules_of_a_sentence_encoder_that_are_not_taken_over(data, tmp_path, pretrained, log, kinds, pooling, told):
    """A module that is not trained, or another pooling, is not dropped without a word."""
    folder = pretrained(BertForMaskedLM)
    paths = dict.fromkeys(kinds, "") | {"Pooling": "1_Pooling"}
    modules = [{"path": paths[kind], "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    assert problems(given(data, tmp_path, {"pretrained": str(folder)})) == []
    assert len(log) == len(told)
    for line in log:
        says(line, *told)


def test_a_dense_layer_without_its_files_is_a_problem(data, tmp_path, pretrained):
    folder = pretrained(BertForMaskedLM)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (problem,) = problems(given(data, tmp_path, {"pretrained": str(folder)}))
    says(problem, "2_Dense", "config.json", "model.safetensors")


def test_spans_shorter_than_the_windows_fit(data, tmp_path):
    encoder = {"from_config": runs.FROM_CONFIG}
    for tokens in (16, 12):
        assert problems(given(data, tmp_path, encoder, spans={"min_tokens": 4, "max_tokens": tokens})) == []


@pytest.mark.parametrize("family", PADDED)
def test_a_family_that_cannot_pack_is_padded(data, tmp_path, log, family):
    encoder = {"from_config": {"model_type": family, **PADDED[family]}}
    config = given(data, tmp_path, encoder)
    assert problems(config) == []
    (line,) = log
    says(line, f"model type {family}", "mixes", "padding")
    assert config.hash() == given(data, tmp_path, encoder).hash()
    log.clear()
    assert problems(given(data, tmp_path, encoder | {"layout": "padded"})) == []
    assert log == []


def test_dropout_by_torch_is_logged(data, tmp_path, log):
    encoder = {"from_config": {"model_type": "longformer", **PADDED["longformer"]}, "layout": "padded", "dropout": 0.1}
    assert problems(given(data, tmp_path, encoder)) == []
    (line,) = log
    assert "type longformer" in line


def test_an_untrained_head_is_not_exported(data, tmp_path, pretrained):
    """Else it would pass for a trained one with who starts from the export."""
    config = given(data, tmp_path, {"pretrained": str(pretrained(BertModel))}, objective={"terms": "contrastive"})
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    encoder = build_encoder(config, tokenizer)
    write_encoder(encoder, tokenizer, tmp_path, encoder.load_report.head)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names
    assert not any(name.startswith("cls.") for name in names)
    (problem,) = problems(given(data, tmp_path, {"pretrained": str(tmp_path)}))
    says(problem, "no MLM head")


def test_pooling_that_would_leave_out_the_first_word(data, tmp_path):
    """`mean_without_cls` needs a special token before each text."""
    bare = shutil.copytree(data, tmp_path / "bare")
    settings = json.loads((bare / "tokenizer" / "tokenizer_config.json").read_text())
    kept = {key: value for key, value in settings.items() if key not in ("bos_token", "cls_token")}
    (bare / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(kept))
    encoder = {"from_config": {**runs.FROM_CONFIG, "model_type": "bert"}}
    for pooling in ("mean", "mean_without_cls"):
        found = problems(given(bare, tmp_path, encoder | {"pooling": pooling}))
        refused = [line for line in found if "no special token" in line]
        assert len(refused) == (pooling == "mean_without_cls")
        assert problems(given(data, tmp_path, encoder | {"pooling": pooling})) == []


TEXTS = ["some words", "others", "some words and others"]


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.Identity()], ids=["tanh", "identity"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_dense_layers_are_loaded_by_every_library(tmp_path, activation, bias):
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(shards(tmp_path / "data") / "tokenizer")
    encoder = build_encoder(config_of(tmp_path / "data", "unused"), tokenizer).eval()
    size = encoder.hidden_size
    folder = tmp_path / "export"
    folder.mkdir()
    write_encoder(encoder, tokenizer, folder)
    loaded = SentenceTransformer(str(folder), device="cpu")
    assert loaded[0].model.pooler is None  # it would be drawn at random and reported as missing
    plain = loaded.encode(TEXTS)
    layers = [Dense(nn.Linear(size, 7, bias=bias), activation), Dense(nn.Linear(7, 5), nn.Tanh())]
    write_steps(folder, layers)
    expected = torch.from_numpy(plain)
    with torch.no_grad():
        for layer in layers:
            expected = layer(expected)
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert theirs.shape == (3, 5)
    assert np.abs(theirs - expected.numpy()).max() < 1e-6
    ours = load_encoder(str(folder)).encode(TEXTS)
    assert np.abs(np.asarray(ours) - theirs).max() < 1e-5


@pytest.mark.parametrize("layers", [0, 1])
def test_an_encoder_with_layers_is_a_start_that_embeds_as_before(tmp_path, layers):
    """Training, held-out scores and export use the layers; without layers, a normalisation changes nothing."""
    torch.manual_seed(3)
    data = shards(tmp_path / "data")
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    config = config_of(data, "unused")
    scratch = build_encoder(config, tokenizer)
    folder = tmp_path / "start"
    folder.mkdir()
    write_encoder(scratch, tokenizer, folder)
    dense = [Dense(nn.Linear(scratch.hidden_size, 5), nn.Tanh())] * layers
    write_steps(folder, [Normalize(), *dense, Normalize()])
    pretrained = config.encoder.model_copy(update={"pretrained": str(folder), "from_config": None})
    config = config.model_copy(update={"encoder": pretrained})
    encoder = build_encoder(config, tokenizer).eval()
    assert encoder.output_size == encoder.embedding_size == (5 if layers else scratch.hidden_size)
    assert len(encoder.behind) == 2 * layers
    before = load_encoder(str(folder)).encode(TEXTS)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    nothing = torch.empty(0, dtype=torch.int64)
    batch = SpanBatch(
        torch.tensor([one for row in ids for one in row]), torch.tensor([len(row) for row in ids]), nothing, nothing
    )
    with torch.no_grad():
        own = nn.functional.normalize(encoder.embed(batch), dim=-1).numpy()
        trained, _ = encoder(batch)
    assert np.abs(own - before).max() < 1e-5
    assert trained.shape == (3, encoder.output_size)
    objective = build_objective(config.main, encoder, load_manifest(data).short_documents)
    task = TrainTask(encoder=encoder, objective=objective, comm=Communicator(), seed=0)
    assert used_parameters(encoder, [task]) >= {id(parameter) for parameter in encoder.behind.parameters()}
    again = tmp_path / "again"
    again.mkdir()
    write_encoder(encoder, tokenizer, again)
    write_steps(again, encoder.behind)
    after = load_encoder(str(again)).encode(TEXTS)
    assert np.abs(after / np.linalg.norm(after, axis=1, keepdims=True) - before).max() < 1e-5


def pictures(folder, first):
    folder.mkdir()
    files = {f"{'ab'[n % 2]}/{n}.png": png(n, (20, 18)) for n in range(first, first + 12)}
    return prepare_media(folder, {"kind": "images", "shortest_edge": 18}, files)[0]


@pytest.fixture
def config(tmp_path):
    """A run with a task of images and a checkpoint after step 2."""
    shards(tmp_path / "data")
    pictures(tmp_path / "images", 0)
    frontend = {"image_size": 16, "patch_size": [8, 8]}
    image = {"data": str(tmp_path / "images/out"), "objective": {"kind": "supcon"}, "batch_documents": 4}
    config = config_of(tmp_path / "data", tmp_path / "run", auxiliary_tasks={"image": image | {"frontend": frontend}})
    folders = {"": tmp_path / "data", "image": tmp_path / "images/out"}
    hashes = {name: data_hash(load_manifest(folder)) for name, folder in folders.items()}
    identity = {"config_hash": config.hash(), "data_hash": joint_hash(hashes), "task_hashes": hashes}
    state = state_of(2).model_copy(update=identity)
    checkpoint.save(tmp_path / "run/checkpoints", state, {"encoder.safetensors": {}})
    return config


def test_replaced_shards_are_named_by_their_task(config, tmp_path):
    assert problems(config) == []
    shutil.rmtree(tmp_path / "images")
    pictures(tmp_path / "images", 50)
    (line,) = problems(config)
    says(line, "other shards", f"auxiliary_tasks.image.data = {tmp_path}/images/out")


def test_a_task_of_images_names_a_wrong_encoder_and_a_damaged_vit(data, tmp_path):
    pictures(tmp_path / "images", 0)
    vit, shape = tmp_path / "vit", SHAPE | {"hidden_size": 32}
    ViTModel(ViTConfig(**shape, image_size=16, patch_size=8), add_pooling_layer=False).save_pretrained(vit)
    image = {"data": str(tmp_path / "images/out"), "objective": {"kind": "supcon"}, "batch_documents": 4}
    image |= {"frontend": {"image_size": 16, "patch_size": [8, 8], "pretrained": str(vit)}}

    def lines(from_config):
        return problems(given(data, tmp_path, {"from_config": from_config}, auxiliary_tasks={"image": image}))

    (line,) = lines({"model_type": "gpt2"})
    says(line, "encoder = {'model_type': 'gpt2'}", "gpt2 is not an encoder")
    assert lines(runs.FROM_CONFIG) == []
    whole = (vit / "model.safetensors").read_bytes()
    (vit / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (line,) = lines(runs.FROM_CONFIG)
    says(line, f"auxiliary_tasks.image.frontend.pretrained = {vit}", "not fully covered")
