"""Frontends: equal to ViT's embeddings, read by every family; accuracy of nearest neighbours of clips."""

import io
import json
import os
import shutil

import numpy as np
import pytest
import tinyruns as runs
import torch
from families import PACKED, PADDED
from measures import deviation
from mediafiles import picture, png, sound, stored, tone
from messages import all_of, says
from PIL import Image, ImageOps
from preparing import prepare_media, prepare_rows
from rows import image_rows
from textruns import IMAGE, IMAGES
from tiny import VOCABULARY, family_encoder, tiny_encoder
from transformers import BertConfig, ViTConfig, ViTModel

from declutr.common.errors import DamagedError, EncoderError
from declutr.pipeline.media.clips import log_mel
from declutr.pipeline.shards.content import AudioContent
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.build import new_frontend
from declutr.trainer.config import TrainConfig
from declutr.trainer.data.batches import PatchBatch
from declutr.trainer.driver.continuation import neighbours_of
from declutr.trainer.model.config import FrontendConfig
from declutr.trainer.model.frontend import Frontend, embedding_width, load_vit
from declutr.trainer.model.layouts import patch_problem
from declutr.trainer.objectives.base import HeldOutSplit
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.supcon.config import MaskConfig, SupconConfig
from declutr.trainer.objectives.supcon.objective import Supcon, nearest_accuracy
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.train import run_training

SIZES = {"patch_size": (4, 4), "image_size": 8}


def clips():
    """Clips of real images, whose lengths are made to differ by leaving out the last patches of some."""
    context = RunContext(frontend=FrontendConfig(**SIZES))
    collator = Supcon(SupconConfig(), context, 8).collator(VOCABULARY, 9)
    batch = collator.collate(image_rows([(9, 9)] * 3), np.zeros(3, np.int64)).spans
    kept = torch.cat([torch.arange(5 * i, 5 * i + size) for i, size in enumerate((5, 3, 5, 2, 4, 5))])
    lengths = torch.tensor([5, 3, 5, 2, 4, 5])
    return type(batch)(batch.values[kept], batch.places[kept], lengths, batch.keys)


def frontend_of(width=16, normal=(0.5, 0.5), **settings):
    return Frontend(FrontendConfig(**(SIZES | settings)), 48, 4, width, 0, normal)


READING = [family for family in PACKED | PADDED if family != "longformer"]


@pytest.mark.parametrize("family", READING)
def test_every_family_reads_patches(family):
    """Clips together equal clips one by one, depend on their patches, and leave the embeddings of tokens alone."""
    encoder, batch = family_encoder(family, mlm=False), clips()
    frontend = frontend_of(width=embedding_width(encoder.model)).double()
    together = encoder(batch, frontend)[0]
    alone = torch.cat([encoder(batch.span_slice(i, i + 1), frontend)[0] for i in range(batch.num_spans)])
    assert deviation([together], [alone]) < (1e-6 if family in PADDED else 1e-12)  # some write masks in float32
    assert deviation([together[:1]], [together[1:2]]) > 1e-3
    together.square().sum().backward()
    touched = [name for name, p in encoder.model.base_model.named_parameters() if p.grad is not None and p.grad.any()]
    assert touched
    assert min(frontend.patches.weight.grad.abs().max(), frontend.cls.grad.abs().max()) > 0
    assert not [name for name in touched if "embed" in name.split(".")[0] and "project" not in name]


def test_an_encoder_that_cannot_read_patches_is_found():
    """Longformer pads its input again, behind the frontend."""
    for family in ("bert", "albert", "mpnet", "longformer"):
        encoder = family_encoder(family, torch.float32, mlm=False)
        problem = patch_problem(encoder, frontend_of(width=embedding_width(encoder.model)))
        assert (problem is None) == (family in READING)
    says(problem, "model type longformer", "patches")


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vit")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    torch.manual_seed(0)
    ViTModel(ViTConfig(**shape, image_size=8, patch_size=4), add_pooling_layer=False).save_pretrained(folder)
    return folder


def patches_of(images):
    return images.view(2, 2, 4, 2, 4, 3).permute(0, 1, 3, 5, 2, 4).reshape(8, 48)


def test_embeddings_equal_those_of_vit_and_layers_are_those_of_bert(vit):
    """`bert.encoder` on the hidden states themselves, as VisualCSE calls it."""
    frontend = frontend_of(pretrained=str(vit))
    load_vit(frontend)
    pixels = torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8)
    values = torch.cat([torch.zeros(2, 1, 48, dtype=torch.uint8), patches_of(pixels).view(2, 4, 48)], dim=1)
    ours = frontend(PatchBatch(values.reshape(10, 48), torch.arange(5).repeat(2), torch.tensor([5, 5])))
    theirs = ViTModel.from_pretrained(vit).embeddings((pixels.permute(0, 3, 1, 2) / 255 - 0.5) / 0.5)
    assert deviation([ours], [theirs.reshape(10, 16)]) < 1e-5
    encoder, batch = tiny_encoder(dropout=0.0, pooling="cls", layout="padded"), clips().span_slice(0, 1)
    frontend = frontend_of(width=embedding_width(encoder.model)).double()
    expected = encoder.model.base_model.encoder(frontend(batch)[None])
    expected = (expected.last_hidden_state if hasattr(expected, "last_hidden_state") else expected[0])[:, 0]
    assert deviation([encoder(batch, frontend)[0]], [expected]) < 1e-12


def test_every_channel_has_its_mean_and_deviation():
    """Against pixels that are normalised as an image; a number for all channels keeps its bits."""
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    pixels = torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8)
    normal = (pixels.double() / 255 - torch.tensor(mean).double()) / torch.tensor(std).double()

    def states(values, **settings):
        frontend = frontend_of(normal=(0.0, 1.0), **settings).double()
        return frontend(PatchBatch(values, torch.arange(1, 5).repeat(2), torch.tensor([4, 4])))

    patches = patches_of(pixels)
    whole = states(patches, mean=mean, std=std)
    assert deviation([whole], [states(patches_of(normal))]) < 1e-6
    assert deviation([whole], [states(patches, mean=0.456, std=0.224)]) > 1e-3
    assert torch.equal(states(patches, mean=0.4, std=0.2), states(patches, mean=(0.4,) * 3, std=(0.2,) * 3))
    assert "mean" not in frontend_of(mean=mean, std=std).state_dict()


def test_another_model_and_a_vit_that_does_not_fit_or_is_beyond_the_bounds_of_a_model_are_refused(vit, tmp_path):
    for changes, message in (
        ({"image_size": 12}, ("image_size is 8", "12")),
        ({"patch_size": (2, 2)}, ("patch_size is 4", "2")),
        ({"width": 24}, ("hidden_size is 16", "24", "ViT")),
    ):
        with pytest.raises(EncoderError, match=all_of(message)):
            load_vit(frontend_of(pretrained=str(vit), **changes))
    BertConfig().save_pretrained(tmp_path)
    with pytest.raises(EncoderError, match=all_of("type bert", "vit")):
        load_vit(frontend_of(pretrained=str(tmp_path)))
    folder = shutil.copytree(vit, tmp_path / "vit")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 5000}))
    frontend = frontend_of(pretrained=str(folder))
    with pytest.raises(DamagedError, match=all_of("num_hidden_layers = 5000", "1,000")):
        load_vit(frontend)
    (folder / "mine.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    code = {"auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}}
    for kind in ("vit", "mine"):
        (folder / "config.json").write_text(json.dumps(settings | code | {"model_type": kind}))
        with pytest.raises(DamagedError, match=all_of("config.json", "auto_map", "ViT without code")):
            load_vit(frontend)
    assert not (tmp_path / "ran").exists()
    os.mkfifo(folder / "weights.json")
    with pytest.raises(DamagedError, match=all_of("weights.json", "a pipe")):
        load_vit(frontend)


AUDIO = {"kind": "audio", "sample_rate": 8000, "num_mel_bins": 20, "max_seconds": 1, "label": None}


def test_every_frame_of_the_longest_clip_has_a_position():
    """Also if the distance of frames is no whole number of samples, which `prepare` cuts."""
    config, samples = FrontendConfig(patch_size=(1, 20)), np.random.default_rng(0).normal(size=11_025)
    content = AudioContent.model_validate(AUDIO | {"sample_rate": 11_025, "hop_length_ms": 1.04})
    assert len(log_mel(samples, content)) == len(new_frontend(config, content, 16, 0).positions) - 1
    whole = AudioContent.model_validate(AUDIO | {"max_seconds": 10.24})
    assert len(new_frontend(config, whole, 16, 0).positions) == 1 + 1024


def test_nearest_accuracy_counts_neighbours_of_the_same_label_and_ties_as_wrong():
    angles = torch.tensor([0.0, 0.1, 1.0, 1.05, 3.0, 4.0], dtype=torch.float64)
    rows = torch.stack([angles.cos(), angles.sin()], dim=1) * torch.arange(1, 7)[:, None]  # lengths have no effect
    labels = np.array([1, 1, 2, 1, 2, 3])
    # 0 and 1 find each other, 2 and 3 are neighbours of different labels, 4 is nearer to 5, 5 has a label of its own
    assert nearest_accuracy(rows, rows, labels) == pytest.approx(2 / 5)
    equal = torch.ones(6, 2, dtype=torch.float64)
    assert nearest_accuracy(equal, equal, labels) == 0
    assert nearest_accuracy(rows, rows, np.arange(6)) is None
    assert nearest_accuracy(rows, rows, np.zeros(6, np.int64)) is None
    assert nearest_accuracy(rows, rows[[0, 1, 2, 3, 5, 4]], None) == pytest.approx(4 / 6)
    assert nearest_accuracy(equal, equal, None) == 0


def validator_of(folder, manifest, encoder, **settings):
    config = FrontendConfig(image_size=16, patch_size=(8, 8))
    objective = Supcon(SupconConfig(**settings), RunContext(frontend=config), encoder.embedding_size)
    frontend = new_frontend(config, manifest.content, embedding_width(encoder.model), 0).double()
    held_out, device = ShardSet(folder, "held-out"), torch.device("cpu")
    return objective.validator(HeldOutSplit(held_out, VOCABULARY, 30, 30, Communicator(), device, frontend))


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """Pictures of two classes that any encoder tells apart: dark ones and bright ones."""
    files = {}
    for number in range(60):
        gray = picture(number, (20, 18)).convert("L")
        for name, low, high in (("dark", 0, 60), ("bright", 200, 255)):
            files[f"{name}/{number}.png"] = stored(ImageOps.colorize(gray, (low,) * 3, (high,) * 3))
    return prepare_media(tmp_path_factory.mktemp("classes"), IMAGES, files)


def test_labels_of_held_out_images_are_found_again_without_augmentation_and_without_a_trace(classes):
    folder, manifest = classes
    encoder = tiny_encoder(dropout=0.1).train()
    before = [parameter.clone() for parameter in encoder.parameters()]
    validator = validator_of(folder, manifest, encoder)
    scores = validator.scores(encoder)
    assert scores["nn_accuracy"] > 0.9
    assert scores == validator.scores(encoder)
    assert encoder.training
    assert all(torch.equal(old, new) for old, new in zip(before, encoder.parameters(), strict=True))
    table = validator.held_out.shards.take(validator.rows)
    views = np.frombuffer(b"".join(validator.views(table)["views"].to_pylist()), np.uint8).reshape(-1, 2, 16, 16, 3)
    for raw, (first, second) in zip(table["image"].to_pylist(), views, strict=True):  # no crop, no other colour
        whole = np.asarray(Image.open(io.BytesIO(raw)).resize((16, 16), Image.Resampling.BILINEAR))
        assert ((first == whole) & (second == whole)).all()
    with torch.no_grad():
        next(encoder.parameters()).fill_(torch.nan)
        encoder.model.base_model.encoder.layer[0].output.dense.weight.fill_(torch.nan)
    assert validator.scores(encoder) is None


def test_rows_without_labels_must_find_their_other_view_if_it_differs(tmp_path):
    encoder = tiny_encoder(dropout=0.0)
    clips = {f"{number}.wav": sound(tone(0.1 + 0.01 * (number % 7), 8000, number), 8000) for number in range(40)}
    sounds = prepare_media(tmp_path / "sounds", AUDIO, clips)
    assert validator_of(*sounds, encoder, labels=False) is None
    masks = MaskConfig(time_mask=2, freq_mask=2)
    assert 0 < validator_of(*sounds, encoder, labels=False, masks=masks, mixup=0.5).scores(encoder)["nn_accuracy"] <= 1
    images = {f"{number}.png": png(number, (20, 18)) for number in range(40)}
    pictures = prepare_media(tmp_path / "images", IMAGES | {"label": None}, images)
    assert 0 <= validator_of(*pictures, encoder, labels=False).scores(encoder)["nn_accuracy"] <= 1


@pytest.mark.slow
def test_run_with_images_has_the_accuracy_before_and_after(classes, tmp_path):
    texts = [{"text": f"words of the sentence {number} and {number % 7} more"} for number in range(60)]
    data, _ = prepare_rows(tmp_path / "sentences", "sentences", texts)
    image = IMAGE | {"data": str(classes[0])}
    values = runs.train_values(
        data, tmp_path / "run", steps=2, objective={"kind": "simcse", "max_tokens": 12}, encoder={"dropout": 0.1},
        auxiliary_tasks={"image": image}, validation={"every_steps": 2}, scaling={"num_workers": 0},
    )  # fmt: skip
    del values["spans"]
    summary = run_training(TrainConfig.model_validate(values))
    assert summary["first_scores"]["image_nn_accuracy"] > 0.5
    [line] = neighbours_of(summary)
    assert line.startswith("image_nn_accuracy ")
    first = {"image_nn_accuracy": 0.25, "mrr": 0.5, "audio_nn_accuracy": None}
    summary = {"first_scores": first, "last_scores": first | {"image_nn_accuracy": 0.75, "audio_nn_accuracy": 0.5}}
    assert neighbours_of(summary) == ["image_nn_accuracy 0.2500 at the start, 0.7500 at the end"]
    assert neighbours_of({"first_scores": {}, "last_scores": {}}) == []
