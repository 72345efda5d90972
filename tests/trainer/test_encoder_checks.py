"""What is known of an encoder and a run's folder before Ray starts; layers behind the pooling of an export."""

import json
import shutil
from itertools import chain

import numpy as np
import pytest
import tinyruns as runs
import torch
from families import PACKED, PADDED
from madeup import config_of, shards
from mediafiles import png
from messages import says
from preparing import prepare_media
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from textruns import IMAGE, IMAGES
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

SHAPE = PACKED["bert"]
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
        kind(BertConfig(vocab_size=len(tokenizer), pad_token_id=1, **SHAPE)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if change:
            weights = load_file(folder / "model.safetensors")
            change(weights)
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return save


def config_with(data, tmp_path, encoder, **changes):
    values = runs.train_values(data, tmp_path / "run", **{"batch_documents": 16} | changes)
    return TrainConfig.model_validate(values | {"encoder": {"dropout": 0.0, **encoder}})


def test_encoder_without_a_head_is_refused(data, tmp_path, pretrained, log):
    """Random weights are refused by name where the MLM loss would train through them, unless they are asked for."""
    encoder = {"pretrained": str(pretrained(BertModel))}
    (problem,) = problems(config_with(data, tmp_path, encoder))
    says(problem, f"encoder.pretrained = {encoder['pretrained']}", "no MLM head")
    assert "cls.predictions.transform.dense.weight" in problem
    assert "objective.terms=contrastive" in problem
    assert "encoder.new_mlm_head=true" in problem
    assert problems(config_with(data, tmp_path, encoder, objective={"terms": "contrastive"})) == []
    assert problems(config_with(data, tmp_path, encoder | {"new_mlm_head": True})) == []
    assert len(problems(config_with(data, tmp_path, encoder, objective={"terms": "mlm"}))) == 1
    assert log == []
    (tmp_path / "run" / "checkpoints" / "step-00000002").mkdir(parents=True)
    assert problems(config_with(data, tmp_path, encoder)) == [], "a run's checkpoints hold its head"


def test_a_new_head_follows_from_the_seed_and_an_untrained_one_is_not_exported(data, tmp_path, pretrained):
    """Else it would pass for a trained one with who starts from the export."""
    encoder, tokenizer = {"pretrained": str(pretrained(BertModel))}, AutoTokenizer.from_pretrained(data / "tokenizer")
    configs = [config_with(data, tmp_path, encoder | {"new_mlm_head": True}, seed=seed) for seed in (0, 0, 1)]
    encoders = (build_encoder(config, tokenizer) for config in configs)
    first, again, different = (encoder.model.cls.predictions.transform.dense.weight for encoder in encoders)
    assert first.equal(again)
    assert not first.equal(different)
    encoder = build_encoder(config_with(data, tmp_path, encoder, objective={"terms": "contrastive"}), tokenizer)
    write_encoder(encoder, tokenizer, tmp_path, encoder.load_report.head)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names
    assert not any(name.startswith("cls.") for name in names)
    (problem,) = problems(config_with(data, tmp_path, {"pretrained": str(tmp_path)}))
    says(problem, "no MLM head")


@pytest.mark.parametrize("terms", ["both", "contrastive"])
def test_incomplete_encoder_is_refused_with_its_weights(data, tmp_path, pretrained, terms):
    for change, parts in (
        (lambda weights: weights.pop(WEIGHT), WEIGHT),
        (lambda weights: [weights.pop(name) for name in list(weights) if ".layer.1." in name], "10 more"),
        (lambda weights: weights.update({WEIGHT: weights[WEIGHT][:5].clone()}), (WEIGHT, "[5, 24]", "[16")),
    ):
        encoder = {"pretrained": str(pretrained(BertForMaskedLM, change)), "new_mlm_head": True}
        (problem,) = problems(config_with(data, tmp_path, encoder, objective={"terms": terms}))
        says(problem, "lack weights", "random")
        says(problem, parts)


def test_truncated_encoder_file_and_a_dense_layer_without_its_files_are_refused(data, tmp_path, pretrained):
    folder = pretrained(BertForMaskedLM)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (problem,) = problems(config_with(data, tmp_path, {"pretrained": str(folder)}))
    says(problem, "2_Dense", "config.json", "model.safetensors")
    (folder / "modules.json").unlink()
    halve(folder / "model.safetensors")
    (problem,) = problems(config_with(data, tmp_path, {"pretrained": str(folder)}))
    assert problem.startswith(f"encoder = {folder}: ")
    assert "not fully covered" in problem


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_unused_weights_are_logged_once(data, tmp_path, pretrained, log, capfd):
    """Weights without a place are named; those of heads that every published encoder brings are not."""
    folder = pretrained(BertForPreTraining)
    assert problems(config_with(data, tmp_path, {"pretrained": str(folder)})) == []
    assert log == []
    pretrained(BertForMaskedLM, lambda weights: weights.update({"bert.adapter.weight": weights[WEIGHT].clone()}))
    assert problems(config_with(data, tmp_path, {"pretrained": str(folder)})) == []
    (line,) = log
    says(line, f"encoder.pretrained = {folder}", "unused weights", "bert.adapter.weight")
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


def test_modules_of_a_sentence_encoder_that_are_not_taken_over_are_logged(data, tmp_path, pretrained, log):
    folder = pretrained(BertForMaskedLM)
    (folder / "1_Pooling").mkdir()
    for behind, pooling, parts in (
        (["Normalize"], {"pooling_mode_mean_tokens": True}, ()),
        ([], {"pooling_mode": "mean"}, ()),
        (["LSTM"], {"pooling_mode": "mean"}, ("module LSTM",)),
        ([], {"pooling_mode_cls_token": True}, ("encoder.pooling = mean",)),
    ):
        log.clear()
        kinds = {"Transformer": "", "Pooling": "1_Pooling"} | dict.fromkeys(behind, "")
        modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in kinds.items()]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        assert problems(config_with(data, tmp_path, {"pretrained": str(folder)})) == []
        assert len(log) == len(parts)
        says(log, *parts)


@pytest.mark.parametrize("family", PADDED)
def test_a_family_that_cannot_pack_is_padded(data, tmp_path, log, family):
    encoder = {"from_config": {"model_type": family, **PADDED[family]}}
    config = config_with(data, tmp_path, encoder)
    assert problems(config) == []
    (line,) = log
    says(line, f"model type {family}", "mixes", "padding")
    assert config.hash() == config_with(data, tmp_path, encoder).hash()
    log.clear()
    assert problems(config_with(data, tmp_path, encoder | {"layout": "padded"})) == []
    assert log == []
    if family == "longformer":  # dropout by torch is logged
        assert problems(config_with(data, tmp_path, encoder | {"layout": "padded", "dropout": 0.1})) == []
        (line,) = log
        assert "type longformer" in line


def test_pooling_that_would_leave_out_the_first_word_is_refused_and_short_spans_fit(data, tmp_path):
    """`mean_without_cls` needs a special token before each text; spans may be shorter than the windows."""
    bare = shutil.copytree(data, tmp_path / "bare")
    path = bare / "tokenizer" / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"bos_token"', '"bare_bos"').replace('"cls_token"', '"bare_cls"'))
    encoder = {"from_config": {**runs.FROM_CONFIG, "model_type": "bert"}}
    for pooling in ("mean", "mean_without_cls"):
        lines = problems(config_with(bare, tmp_path, encoder | {"pooling": pooling}))
        assert len([line for line in lines if "no special token" in line]) == (pooling == "mean_without_cls")
        assert problems(config_with(data, tmp_path, encoder | {"pooling": pooling})) == []
    for tokens in (16, 12):
        spans = {"min_tokens": 4, "max_tokens": tokens}
        assert problems(config_with(data, tmp_path, {"from_config": runs.FROM_CONFIG}, spans=spans)) == []


TEXTS = ["some words", "others", "some words and others"]


def export(encoder, tokenizer, folder, layers=()):
    folder.mkdir(exist_ok=True)
    write_encoder(encoder, tokenizer, folder)
    write_steps(folder, layers)
    return str(folder)


@pytest.fixture
def scratch(tmp_path):
    torch.manual_seed(3)
    config = config_of(shards(tmp_path / "data"), "unused")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "data" / "tokenizer")
    return config, tokenizer, build_encoder(config, tokenizer).eval()


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.Identity()], ids=["tanh", "identity"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_dense_layers_are_loaded_by_every_library(scratch, tmp_path, activation, bias):
    _, tokenizer, encoder = scratch
    loaded = SentenceTransformer(export(encoder, tokenizer, tmp_path / "export"), device="cpu")
    assert loaded[0].model.pooler is None  # it would be drawn at random and reported as missing
    expected = torch.from_numpy(loaded.encode(TEXTS))
    layers = [Dense(nn.Linear(encoder.hidden_size, 7, bias=bias), activation), Dense(nn.Linear(7, 5), nn.Tanh())]
    folder = export(encoder, tokenizer, tmp_path / "export", layers)
    with torch.no_grad():
        for layer in layers:
            expected = layer(expected)
    theirs = SentenceTransformer(folder, device="cpu").encode(TEXTS)
    assert theirs.shape == (3, 5)
    assert np.abs(theirs - expected.numpy()).max() < 1e-6
    assert np.abs(np.asarray(load_encoder(folder).encode(TEXTS)) - theirs).max() < 1e-5


@pytest.mark.parametrize("layers", [0, 1])
def test_an_encoder_with_layers_is_a_start_that_embeds_as_before(scratch, tmp_path, layers):
    """Training, held-out scores and export use the layers; without layers, a normalisation changes nothing."""
    config, tokenizer, random = scratch
    dense = [Dense(nn.Linear(random.hidden_size, 5), nn.Tanh())] * layers
    start = export(random, tokenizer, tmp_path / "start", [Normalize(), *dense, Normalize()])
    pretrained = config.encoder.model_copy(update={"pretrained": start, "from_config": None})
    config = config.model_copy(update={"encoder": pretrained})
    encoder = build_encoder(config, tokenizer).eval()
    assert encoder.output_size == encoder.embedding_size == (5 if layers else random.hidden_size)
    assert len(encoder.behind) == 2 * layers
    before = load_encoder(start).encode(TEXTS)
    ids, nothing = [tokenizer(text)["input_ids"] for text in TEXTS], torch.empty(0, dtype=torch.int64)
    batch = SpanBatch(torch.tensor([*chain(*ids)]), torch.tensor([*map(len, ids)]), nothing, nothing)
    with torch.no_grad():
        own = nn.functional.normalize(encoder.embed(batch), dim=-1).numpy()
        trained, _ = encoder(batch)
    assert np.abs(own - before).max() < 1e-5
    assert trained.shape == (3, encoder.output_size)
    objective = build_objective(config.main, encoder, load_manifest(tmp_path / "data").short_documents)
    task = TrainTask(encoder=encoder, objective=objective, comm=Communicator(), seed=0)
    assert used_parameters(encoder, [task]) >= {id(parameter) for parameter in encoder.behind.parameters()}
    after = load_encoder(export(encoder, tokenizer, tmp_path / "again", encoder.behind)).encode(TEXTS)
    assert np.abs(after / np.linalg.norm(after, axis=1, keepdims=True) - before).max() < 1e-5


def pictures(folder, first):
    folder.mkdir()
    files = {f"{'ab'[n % 2]}/{n}.png": png(n, (20, 18)) for n in range(first, first + 12)}
    return prepare_media(folder, IMAGES, files)[0]


def test_replaced_shards_are_named_by_their_task(tmp_path):
    folders = {"": shards(tmp_path / "data"), "image": pictures(tmp_path / "images", 0)}
    image = IMAGE | {"data": str(folders["image"])}
    config = config_of(folders[""], tmp_path / "run", auxiliary_tasks={"image": image})
    hashes = {name: data_hash(load_manifest(folder)) for name, folder in folders.items()}
    identity = {"config_hash": config.hash(), "data_hash": joint_hash(hashes), "task_hashes": hashes}
    state = state_of(2).model_copy(update=identity)
    checkpoint.save(tmp_path / "run/checkpoints", state, {"encoder.safetensors": {}})
    assert problems(config) == []
    shutil.rmtree(tmp_path / "images")
    pictures(tmp_path / "images", 50)
    (line,) = problems(config)
    says(line, "other shards", f"auxiliary_tasks.image.data = {tmp_path}/images/out")


def test_a_task_of_images_names_a_wrong_encoder_and_a_damaged_vit(data, tmp_path):
    vit, shape = tmp_path / "vit", SHAPE | {"hidden_size": 32, "image_size": 16, "patch_size": 8}
    ViTModel(ViTConfig(**shape), add_pooling_layer=False).save_pretrained(vit)
    image = {"data": str(pictures(tmp_path / "images", 0)), "frontend": IMAGE["frontend"] | {"pretrained": str(vit)}}

    def lines(from_config):
        encoder = {"from_config": from_config}
        return problems(config_with(data, tmp_path, encoder, auxiliary_tasks={"image": IMAGE | image}))

    (line,) = lines({"model_type": "gpt2"})
    says(line, "encoder = {'model_type': 'gpt2'}", "gpt2 is not an encoder")
    assert lines(runs.FROM_CONFIG) == []
    halve(vit / "model.safetensors")
    (line,) = lines(runs.FROM_CONFIG)
    says(line, f"auxiliary_tasks.image.frontend.pretrained = {vit}", "not fully covered")
