"""Packed and padded forwards are the same function; their FLOPs; training of the last layers alone."""

import families
import pytest
import tiny
import torch
from measures import deviation
from messages import all_of
from tiny import FAMILIES, HALF, VOCABULARY, random_spans, tiny_encoder
from tokenizers import Tokenizer, models
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedTokenizerFast
from vocabularies import ROLES

from declutr.common.errors import EncoderError
from declutr.trainer.build import freeze_unused
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.model.config import EncoderConfig
from declutr.trainer.model.encoder import mlm_head
from declutr.trainer.model.language_model import frozen_parameters, load_hf_config, max_span_tokens, vocabulary_of
from declutr.trainer.model.layouts import embedding_layout
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.step.task import gpu_name, peak_flops, step_flops

POOLINGS = ["mean", "cls", "max", "mean_without_cls"]
MIXED = [9, 3, 30, 12, 12, 4, 27, 9]  # the window of ModernBERT's local layers is 5
SHAPES = {
    "mixed": MIXED, "single span": [17], "one token of content": [3, 3, 3], "one token": [1, 20, 1],
    "equal lengths": [11, 11, 11, 11], "long and short": [36, 3],
}  # fmt: skip


def values_and_gradients(encoder, batch):
    """Embeddings, MLM loss, and the gradient of a weighted sum of both in every parameter."""
    encoder.zero_grad()
    embeddings, mlm = encoder(batch)
    weights = torch.sin(torch.arange(embeddings.numel()).to(embeddings)).view_as(embeddings)
    ((embeddings * weights).sum() + mlm / max(1, len(batch.labels))).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in encoder.parameters()]
    return embeddings, mlm, gradients


def difference(family, lengths, dtype=torch.float64):
    """Deviation of packed from padded spans. MLM may draw the padding id, a token whose positions RoBERTa skips."""
    batch = random_spans(lengths, num_selected=min(5, sum(lengths) // 2))
    if lengths == MIXED:
        batch.input_ids[[4, 15, 16, 70]] = 1
    packed, padded = (
        values_and_gradients(tiny_encoder(family, dtype, layout=layout), batch) for layout in ("packed", "padded")
    )
    assert any(gradient.abs().max() > 0 for gradient in packed[2])
    return max(deviation(packed[:1], padded[:1]), deviation(packed[1:2], padded[1:2]), deviation(packed[2], padded[2]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=list(SHAPES))
def test_packed_batch_equals_padded_one(family, lengths):
    assert difference(family, lengths) < 1e-10
    if lengths == MIXED:
        assert difference(family, MIXED, torch.float32) < 1e-5


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_equals_a_plain_writing_and_no_spans_have_empty_embeddings(pooling, layout):
    batch, encoder = random_spans(MIXED), tiny_encoder(pooling=pooling, layout=layout)
    parts = tiny_encoder().hidden(batch).split(MIXED)
    means = {"mean": lambda h: h.mean(0), "mean_without_cls": lambda h: h[1:].mean(0)}
    by_hand = {**means, "cls": lambda h: h[0], "max": lambda h: h.amax(0)}[pooling]
    assert deviation([encoder.embed(batch)], [torch.stack([by_hand(part) for part in parts])]) < 1e-12
    encoder = tiny_encoder(pooling=pooling, layout=layout, projection={"kind": "linear", "size": 6})
    embeddings, mlm = encoder(random_spans([]))
    assert (embeddings.shape, mlm.item(), encoder.embed(random_spans([])).shape) == ((0, 6), 0.0, (0, 16))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_half_precision_is_pooled_in_float32_and_ends_before_the_losses(pooling):
    encoder, lengths = tiny_encoder(dtype=torch.float32, pooling=pooling), torch.tensor([300, 5])
    hidden = torch.randn(305, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(encoder.pool(hidden, lengths), encoder.pool(hidden.float(), lengths))
    encoder = tiny_encoder(dtype=torch.float32, pooling=pooling, projection={"kind": "mlp", "size": 6})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings, mlm = encoder(random_spans(MIXED, num_selected=5))
    assert embeddings.dtype == mlm.dtype == torch.float32


def test_seeds_decide_the_weights():
    def weights(seed):
        return torch.cat([p.flatten() for p in tiny_encoder(projection={"kind": "mlp"}, seed=seed).parameters()])

    state = torch.random.get_rng_state()
    first, again, other = weights(0), weights(0), weights(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first, again)
    assert (first != other).float().mean() > 0.8


@pytest.mark.parametrize(("family", "limit"), [("roberta", 38), ("bert", 40), ("modernbert", 40)])
def test_longest_span_is_the_limit_of_positions(family, limit):
    """The limit works, one token more does not (ModernBERT's rotary positions do not end there)."""
    encoder = tiny_encoder(family)
    assert max_span_tokens(encoder.model) == limit
    encoder.embed(random_spans([limit]))
    if family != "modernbert":
        with pytest.raises(IndexError):
            encoder.embed(random_spans([limit + 1]))


def test_an_unknown_head_and_an_unknown_type_are_refused():
    with pytest.raises(ValueError, match=all_of("Linear", "MLM head")):
        mlm_head(nn.Linear(1, 1))
    with pytest.raises(EncoderError, match=all_of("'robberta'", "`roberta`")):
        load_hf_config(EncoderConfig(from_config={"model_type": "robberta"}), 100, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_packs_tells_who_can(family):
    """Trying the layouts leaves the encoder as it was; positions that the padded forward does not use are found out."""
    encoder = tiny_encoder(family, torch.float32)
    assert (embedding_layout(encoder), encoder.config.layout, encoder.training) == ("packed", "packed", True)
    if family != "modernbert":  # its positions are relative: shifted ones change nothing
        encoder.padding_index = 30
        assert embedding_layout(encoder) == "padded"


def test_vocabulary_of_a_tokenizer_has_its_special_ids():
    words = Tokenizer(models.WordLevel({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "<mask>": 5}, "<unk>"))
    names = {f"{role}_token": ROLES[role] for role in ("bos", "eos", "pad", "unk", "mask")}
    vocabulary = vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=words, **names))
    assert vocabulary == Vocabulary(size=6, bos=0, eos=2, mask=5, special=(0, 1, 2, 3, 5))
    assert vocabulary.num_specials == VOCABULARY.num_specials == 2
    del names["mask_token"]
    with pytest.raises(ValueError, match="no mask token"):
        vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=words, **names))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own, about gradients of non-leaf tensors
@pytest.mark.parametrize("setting", ["activation_checkpointing", pytest.param("compile", marks=pytest.mark.nightly)])
def test_settings_for_speed_and_memory_change_no_gradient(setting):
    """With dropout, over ragged batches; after two of them nothing is compiled again."""
    encoders = tiny_encoder(dropout=0.1), tiny_encoder(dropout=0.1, **{setting: True})
    torch._dynamo.reset()
    before = torch._dynamo.config.error_on_recompile
    try:
        for number, lengths in enumerate([[5, 9], [3, 3, 20, 11], [17], [4, 8, 15, 16, 23]]):
            torch._dynamo.config.error_on_recompile = number >= 2
            batch = random_spans(lengths, num_selected=3, seed=number)
            plain, special = (values_and_gradients(encoder, batch)[2] for encoder in encoders)
            assert deviation(special, plain) < 1e-10
    finally:
        torch._dynamo.config.error_on_recompile = before


def test_equal_to_torchs_counter():
    """One span: what torch counts is what the formula says, but for attention, which torch leaves out on a CPU."""
    for family in FAMILIES:
        encoder = tiny_encoder(family, layout="padded", from_config={"num_hidden_layers": 3})
        batch = random_spans([30], num_selected=7)
        with FlopCounterMode(display=False) as forward, torch.no_grad():
            encoder(batch)
        attention = 4 * 3 * 16 * 30**2
        assert forward.get_total_flops() + attention == step_flops(encoder.model, batch.lengths, 7) / 3


def test_peak_of_a_gpu_follows_from_its_name():
    peaks = {
        "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": 835e12, "NVIDIA H200": 989e12,
        "NVIDIA GH200 480GB": 989e12, "NVIDIA A10G": 70e12, "NVIDIA B200": 2250e12, "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA L40S": 362e12, "NVIDIA L40": 181e12, "NVIDIA L4": 121e12, "NVIDIA L400": None, "Tesla T4": None,
    }  # fmt: skip
    assert {name: peak_flops(name, half=True) for name in peaks} == peaks
    assert peak_flops(gpu_name(torch.device("cpu")), half=True) is None


KINDS = {**families.PACKED, **families.PADDED}


def model_of(kind):
    return tiny_encoder("bert", torch.float32, from_config={"model_type": kind, **KINDS[kind]}).model


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "albert"])
def test_frozen_parameters_leave_the_last_layer_and_its_norm(kind):
    model = model_of(kind)
    frozen, parameters = {id(p) for p in frozen_parameters(model, 1)}, dict(model.base_model.named_parameters())
    trained = {name for name, p in parameters.items() if id(p) not in frozen}
    last = {name for name in parameters if ".1." in f".{name}"}
    assert trained >= last > set()
    assert {name.split(".")[0] for name in trained - last} <= {"final_norm", "norm"}
    assert id(model.get_input_embeddings().weight) in frozen
    assert not frozen_parameters(model, None)
    with pytest.raises(EncoderError, match=all_of("num_trainable_layers = 3", "2 layers", "at most 2")):
        frozen_parameters(model, 3)


def test_frozen_parameters_of_shared_layers_are_refused():
    with pytest.raises(EncoderError, match=all_of("2 layers", "model type albert", "share")):
        frozen_parameters(model_of("albert"), 1)


def gradients(family, num_trainable_layers, tokens):
    config, head = DeclutrConfig(masking=HALF), {"kind": "mlp", "size": 6}
    encoder = tiny_encoder(family, projection=head, num_trainable_layers=num_trainable_layers, dropout=0.1)
    train_step = tiny.tiny_train_step(encoder, config, microbatch_tokens=tokens)
    freeze_unused(encoder, train_step.tasks)
    train_step.optimizer.zero_grad()
    train_step.gradients(
        {"": tiny.rank_batch(tiny.tiny_collator(config), tiny.documents([48, 70, 49], 12), 0, None)}, 1
    )
    return {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [None, 60])
def test_gradients_of_trained_layers_are_those_of_the_whole_encoder(family, tokens):
    every, last = gradients(family, None, tokens), gradients(family, 1, tokens)
    assert len(last) < len(every)
    assert any("layer.1" in name or "layers.1" in name for name in last)
    assert any("projection" in name or "head" in name or "cls" in name for name in last)
    assert not any("embeddings" in name for name in last)
    assert deviation(last.values(), [every[name] for name in last]) < 1e-10
