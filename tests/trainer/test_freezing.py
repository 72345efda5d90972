"""Training of the last layers alone."""

import families
import pytest
from measures import deviation
from messages import all_of
from tiny import FAMILIES, HALF, documents, rank_batch, tiny_collator, tiny_encoder, tiny_train_step

from declutr.common.errors import EncoderError
from declutr.trainer.model.config import EncoderConfig
from declutr.trainer.model.freezing import frozen_parameters
from declutr.trainer.model.language_model import load_hf_config, load_model
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.setup.tasks import freeze_unused

IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
KINDS = {**families.PACKED, **families.PADDED}


def model_of(kind):
    config = EncoderConfig(from_config={"model_type": kind, **KINDS[kind]})
    return load_model(config, load_hf_config(config, 64, IDS), 0)[0]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "albert"])
def test_frozen_parameters_leave_the_last_layer_and_its_norm(kind):
    model = model_of(kind)
    frozen = {id(p) for p in frozen_parameters(model, 1)}
    trained = [name for name, p in model.base_model.named_parameters() if id(p) not in frozen]
    last = [name for name in trained if ".1." in f".{name}"]
    assert last
    assert {name.split(".")[0] for name in trained if name not in last} <= {"final_norm", "norm"}
    assert len(last) == len([name for name, _ in model.base_model.named_parameters() if ".1." in f".{name}"])
    assert id(model.get_input_embeddings().weight) in frozen
    assert not frozen_parameters(model, None)


def test_frozen_parameters_of_shared_layers_are_refused():
    with pytest.raises(EncoderError, match=all_of("2 layers", "model type albert", "share")):
        frozen_parameters(model_of("albert"), 1)


def test_frozen_parameters_of_too_many_layers_are_refused():
    with pytest.raises(EncoderError, match=all_of("num_trainable_layers = 3", "2 layers", "at most 2")):
        frozen_parameters(model_of("bert"), 3)


def gradients(family, num_trainable_layers, tokens):
    """Gradients of a step by name, those of a head and of a projection among them."""
    config = DeclutrConfig(masking=HALF)
    encoder = tiny_encoder(
        family, projection={"kind": "mlp", "size": 6}, num_trainable_layers=num_trainable_layers, dropout=0.1
    )
    train_step = tiny_train_step(encoder, config, microbatch_tokens=tokens)
    freeze_unused(encoder, train_step.tasks)
    train_step.optimizer.zero_grad()
    train_step.gradients({"": rank_batch(tiny_collator(config), documents([48, 70, 49], 12), 0, None)}, 1)
    return {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [None, 60])
def test_gradients_of_trained_layers_are_those_of_the_whole_encoder(family, tokens):
    every, some = gradients(family, None, tokens), gradients(family, 1, tokens)
    assert 0 < len(some) < len(every)
    assert any("layer.1" in name or "layers.1" in name for name in some)
    assert not any("embeddings" in name for name in some)
    assert deviation([some[name] for name in some], [every[name] for name in some]) < 1e-10
    assert {name for name in some if "projection" in name or "head" in name or "cls" in name}
