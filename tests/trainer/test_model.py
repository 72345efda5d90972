"""Packed and padded forwards are the same function, values and gradients, for every family."""

import copy

import pytest
import torch
from measures import deviation
from messages import all_of, says
from tiny import FAMILIES, VOCABULARY, random_spans, tiny_encoder
from torch import nn

from declutr.common.errors import EncoderError
from declutr.trainer.data.batches import SpanBatch
from declutr.trainer.model.attention import AttentionLayout
from declutr.trainer.model.config import EncoderConfig
from declutr.trainer.model.language_model import load_hf_config, max_span_tokens, mlm_head, vocabulary_of
from declutr.trainer.model.layouts import embedding_layout

POOLINGS = ["mean", "cls", "max", "mean_without_cls"]
MIXED = [9, 3, 30, 12, 12, 4, 27, 9]  # the window of ModernBERT's local layers is 5
SHAPES = {
    "mixed": MIXED,
    "single span": [17],
    "one token of content": [3, 3, 3],
    "one token": [1, 20, 1],
    "equal lengths": [11, 11, 11, 11],
    "long and short": [36, 3],
}


def values_and_gradients(encoder, batch):
    """Embeddings, MLM loss, and the gradient of a weighted sum of both in every parameter."""
    encoder.zero_grad()
    embeddings, mlm = encoder(batch)
    weights = torch.sin(torch.arange(embeddings.numel()).to(embeddings)).view_as(embeddings)
    ((embeddings * weights).sum() + mlm / max(1, len(batch.labels))).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in encoder.parameters()]
    return embeddings, mlm, gradients


def compare(family, lengths, dtype=torch.float64, seed=0, **settings):
    batch = random_spans(lengths, num_selected=min(5, sum(lengths) // 2), seed=seed)
    results = [
        values_and_gradients(tiny_encoder(family, dtype, layout=layout, **settings), batch)
        for layout in ("packed", "padded")
    ]
    (embeddings, mlm, gradients), (expected, expected_mlm, expected_gradients) = results
    assert any(gradient.abs().max() > 0 for gradient in gradients)
    return max(
        deviation([embeddings], [expected]), deviation([mlm], [expected_mlm]), deviation(gradients, expected_gradients)
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=list(SHAPES))
def test_packed_batch_equals_padded_one(family, lengths):
    assert compare(family, lengths) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("projection", ["none", "linear", "mlp"])
def test_pooling_and_projection_have_their_sizes(family, pooling, projection):
    assert compare(family, MIXED, pooling=pooling, projection={"kind": projection, "size": 6}) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_batch_equals_padded_one_in_float32(family):
    assert compare(family, MIXED, torch.float32) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_id_inside_a_span_is_a_token_like_others(family):
    """MLM may draw the padding id as a replacement. It is a token like others; RoBERTa's positions skip it."""
    batch = random_spans(MIXED)
    ids = batch.input_ids.clone()
    ids[[4, 15, 16, 70]] = 1
    batch = SpanBatch(ids, batch.lengths, batch.selected, batch.labels)
    packed, padded = (tiny_encoder(family, layout=layout).embed(batch) for layout in ("packed", "padded"))
    assert deviation([packed], [padded]) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_spans_do_not_see_each_other(family, layout):
    batch, encoder = random_spans(MIXED), tiny_encoder(family, layout=layout)
    together = encoder.embed(batch)
    alone = torch.cat([encoder.embed(batch.span_slice(i, i + 1)) for i in range(batch.num_spans)])
    assert deviation([together], [alone]) < 1e-10


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_equals_a_plain_writing(pooling):
    batch, encoder = random_spans(MIXED), tiny_encoder(pooling=pooling)
    parts = encoder.hidden(batch).split(MIXED)
    means = {"mean": lambda h: h.mean(0), "mean_without_cls": lambda h: h[1:].mean(0)}
    by_hand = {**means, "cls": lambda h: h[0], "max": lambda h: h.amax(0)}[pooling]
    assert deviation([encoder.embed(batch)], [torch.stack([by_hand(part) for part in parts])]) < 1e-12


def test_mlm_loss_equals_a_plain_writing():
    """Sum of the cross entropies of the whole model's own logits."""
    batch, encoder = random_spans([20], num_selected=6), tiny_encoder(layout="padded")
    logits = encoder.model(input_ids=batch.input_ids[None]).logits[0, batch.selected]
    expected = nn.functional.cross_entropy(logits, batch.labels, reduction="sum")
    assert deviation([encoder(batch)[1]], [expected]) < 1e-12


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_batch_without_spans_has_empty_embeddings(pooling, layout):
    encoder = tiny_encoder(pooling=pooling, layout=layout, projection={"kind": "linear", "size": 6})
    embeddings, mlm = encoder(random_spans([]))
    assert embeddings.shape == (0, 6)
    assert mlm.item() == 0.0
    assert encoder.embed(random_spans([])).shape == (0, 16)


def test_nothing_selected_is_a_loss_of_zero():
    _, mlm = tiny_encoder()(random_spans(MIXED))
    assert mlm.item() == 0.0


def test_half_precision_ends_before_the_losses():
    encoder = tiny_encoder(dtype=torch.float32, projection={"kind": "mlp", "size": 6})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings, mlm = encoder(random_spans(MIXED, num_selected=5))
    assert embeddings.dtype == mlm.dtype == torch.float32


@pytest.mark.parametrize("pooling", POOLINGS)
def test_half_precision_is_pooled_in_float32(pooling):
    encoder, lengths = tiny_encoder(dtype=torch.float32, pooling=pooling), torch.tensor([300, 5])
    hidden = torch.randn(305, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(encoder.pool(hidden, lengths), encoder.pool(hidden.float(), lengths))


def test_seeds_decide_the_weights():
    def weights(seed):
        return torch.cat([p.flatten() for p in tiny_encoder(projection={"kind": "mlp"}, seed=seed).parameters()])

    state = torch.random.get_rng_state()
    first, again, other = weights(0), weights(0), weights(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first, again)
    assert (first != other).float().mean() > 0.8


def test_a_copied_encoder_is_complete():
    """Its MLM head is its own: nothing of the original remains in it."""
    encoder, batch = tiny_encoder("modernbert"), random_spans(MIXED, num_selected=5)
    twin = copy.deepcopy(encoder)
    expected = twin(batch)[1].item()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.zero_()
    assert twin(batch)[1].item() == expected


@pytest.mark.parametrize(("family", "limit"), [("roberta", 38), ("bert", 40), ("modernbert", 40)])
def test_longest_span_is_the_limit_of_positions(family, limit):
    """The limit works, one token more does not (ModernBERT's rotary positions do not end there)."""
    encoder = tiny_encoder(family)
    assert max_span_tokens(encoder.model) == limit
    encoder.embed(random_spans([limit]))
    if family != "modernbert":
        with pytest.raises(IndexError):
            encoder.embed(random_spans([limit + 1]))


def test_dropout_setting_reaches_every_family():
    for family in FAMILIES:
        batch = random_spans(MIXED)
        quiet, loud = tiny_encoder(family), tiny_encoder(family, dropout=0.5)
        assert torch.equal(quiet.embed(batch), quiet.embed(batch))
        assert torch.equal(loud.embed(batch), loud.embed(batch))  # the same keys, the same masks
        assert not torch.allclose(loud.embed(batch), loud.eval().embed(batch), rtol=0.1)


def test_encoder_of_an_unknown_head_is_refused():
    with pytest.raises(ValueError, match=all_of("Linear", "MLM head")):
        mlm_head(nn.Linear(1, 1))


@pytest.mark.parametrize("sources", [{}, {"pretrained": "x", "from_config": {"model_type": "bert"}}])
def test_encoder_of_two_sources_is_refused(sources):
    with pytest.raises(ValueError, match=all_of("exactly one", "`pretrained`")):
        EncoderConfig(**sources)


def test_an_unknown_type_is_named_with_the_nearest_one():
    settings = EncoderConfig(from_config={"model_type": "robberta"})
    with pytest.raises(EncoderError) as error:
        load_hf_config(settings, 100, {})
    says(error.value, "'robberta'", "`roberta`")


def test_scratch_needs_a_type():
    with pytest.raises(ValueError, match=all_of("from_config", "`model_type`")):
        EncoderConfig(from_config={"hidden_size": 8})


@pytest.mark.parametrize("family", FAMILIES)
def test_packs_tells_who_can(family):
    """Trying the layouts leaves the encoder as it was; positions that the padded forward does not use are found out."""
    encoder = tiny_encoder(family, torch.float32)
    assert embedding_layout(encoder) == "packed"
    assert encoder.training
    assert encoder.config.layout == "packed"
    if family != "modernbert":  # its positions are relative: shifted ones change nothing
        encoder.padding_index = 30
        assert embedding_layout(encoder) == "padded"


def test_groups_cover_every_token_once():
    for lengths in [*SHAPES.values(), [200, 190, 150, 120, 100, 20, 5]]:
        layout = AttentionLayout(torch.tensor(lengths), torch.device("cpu"))
        covered = torch.cat([group.tokens.flatten() for group in layout.groups])
        assert torch.equal(covered[layout.order], torch.arange(sum(lengths)))


def test_vocabulary_of_a_tokenizer_has_its_special_ids():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "<mask>": 5}, "<unk>"))
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }
    found = vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=words, **names))
    assert (found.size, found.bos, found.eos, found.mask, found.special) == (6, 0, 2, 5, (0, 1, 2, 3, 5))
    assert found.num_specials == VOCABULARY.num_specials == 2
    del names["mask_token"]
    with pytest.raises(ValueError, match="no mask token"):
        vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=words, **names))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own, about gradients of non-leaf tensors
@pytest.mark.parametrize("setting", ["activation_checkpointing", "compile"])
def test_settings_for_speed_and_memory_change_no_gradient(setting):
    """With dropout, over ragged batches; after two of them nothing is compiled again."""
    plain, special = tiny_encoder(dropout=0.1), tiny_encoder(dropout=0.1, **{setting: True})
    torch._dynamo.reset()
    before = torch._dynamo.config.error_on_recompile
    try:
        for number, lengths in enumerate([[5, 9], [3, 3, 20, 11], [17], [4, 8, 15, 16, 23]]):
            torch._dynamo.config.error_on_recompile = number >= 2
            batch = random_spans(lengths, num_selected=3, seed=number)
            found = []
            for encoder in (plain, special):
                encoder.zero_grad()
                embeddings, mlm_sum = encoder(batch)
                (embeddings.square().sum() + mlm_sum).backward()
                found.append([p.grad.clone() for p in encoder.parameters() if p.grad is not None])
            assert deviation(found[1], found[0]) < 1e-10
    finally:
        torch._dynamo.config.error_on_recompile = before
