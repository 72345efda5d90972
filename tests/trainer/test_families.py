"""Every family of encoders: the layout it is trained in, no leaks between spans, a loss that is transformers' own."""

import pytest
import torch
from families import OTHERS, PACKED, REFUSED, TRAINED
from groups import run_group
from measures import deviation
from messages import all_of
from tiny import HALF, documents, family_encoder, random_spans, rank_batch, tiny_collator, tiny_encoder, tiny_train_step
from tokenizers import Tokenizer, models
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedTokenizerFast

from declutr.common.errors import EncoderError
from declutr.trainer.data.batches import SpanBatch, as_rows, padding_mask
from declutr.trainer.driver.export import write_encoder
from declutr.trainer.model.config import EncoderConfig
from declutr.trainer.model.language_model import FAMILIES, load_hf_config
from declutr.trainer.model.layouts import drops_by_key, fitting_layout
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.parallel.communicator import Communicator

MIXED = [9, 3, 30, 12, 12, 4]
LENGTHS = [48, 70, 49, 60]
KEYED = [family for family in TRAINED if family != "longformer"]


@pytest.mark.parametrize("range_", [0.02, 0.3])
@pytest.mark.parametrize("family", TRAINED)
def test_fitting_layout_is_packed_where_it_is_exact(family, range_):
    """Also with new weights, whose attention hardly differs from a mean. Trying leaves no trace."""
    state = torch.random.get_rng_state()
    shape = {"model_type": family, **TRAINED[family], "initializer_range": range_}
    encoder = tiny_encoder("bert", torch.float32, from_config=shape, dropout=0.1)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    assert fitting_layout(encoder, mlm=True) == ("packed" if family in PACKED else "padded")
    assert encoder.training
    assert encoder.config.layout == "packed"
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    encoder.set_layout(encoder.config.model_copy(update={"layout": "padded"}))
    assert fitting_layout(encoder, mlm=True) == "padded"  # asked for


@pytest.mark.parametrize("family", TRAINED)
def test_another_span_changes_nothing(family):
    encoder, batch = family_encoder(family), random_spans(MIXED)
    expected = encoder.embed(batch)
    alone = torch.cat([encoder.embed(batch.span_slice(i, i + 1)) for i in range(batch.num_spans)])
    assert deviation([alone], [expected]) < 1e-6  # some write attention masks in float32
    for changed in range(batch.num_spans):
        ids = torch.cat([part.flip(0) if i == changed else part for i, part in enumerate(batch.input_ids.split(MIXED))])
        embeddings = encoder.embed(SpanBatch(ids, batch.lengths, batch.selected, batch.labels))
        rest = [i for i in range(batch.num_spans) if i != changed]
        assert deviation([embeddings[rest]], [expected[rest]]) < 1e-10
        assert deviation([embeddings[changed]], [expected[changed]]) > 1e-4


@pytest.mark.parametrize("family", TRAINED)
def test_the_loss_is_the_whole_models(family):
    """Summed over the selected tokens, as transformers' own masked language model gives it for padded spans."""
    encoder, batch = family_encoder(family), random_spans(MIXED, num_selected=9)
    ids, mask = as_rows(batch.input_ids, batch, 1), padding_mask(batch)
    labels = torch.full_like(batch.input_ids, -100)
    labels[batch.selected] = batch.labels
    rows = torch.full_like(ids, -100).masked_scatter(mask, labels)
    loss = encoder(batch)[1]
    encoder.set_layout(encoder.config.model_copy(update={"layout": "padded"}))
    expected = encoder.model(input_ids=ids, attention_mask=mask.long(), labels=rows).loss * len(batch.labels)
    assert deviation([loss], [expected]) < 1e-6


@pytest.mark.parametrize("family", TRAINED)
def test_an_export_loads_as_it_was(tmp_path, family):
    encoder, batch = family_encoder(family, torch.float32).eval(), random_spans(MIXED, num_selected=9)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    write_encoder(encoder, tokenizer, tmp_path)
    expected, loss = encoder(batch)
    loaded, info = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert deviation(type(encoder)(encoder.config, loaded, 0).eval()(batch), [expected, loss]) < 1e-6
    ids, mask = as_rows(batch.input_ids, batch, 1), padding_mask(batch)
    hidden = AutoModel.from_pretrained(tmp_path).eval()(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    assert deviation([means], [expected]) < 1e-5


def losses_and_norms(family, layout=None, tokens=None, dropout=0.0, comm=None):
    """Losses and gradient norms of three steps, in a layout or, without one, in that which fits."""
    objective, comm = DeclutrConfig(masking=HALF), comm or Communicator()
    dtype = torch.float32 if family == "longformer" else torch.float64  # transformers' own gives NaN in float64
    settings = {"layout": layout} if layout else {}
    encoder = family_encoder(family, dtype, dropout=dropout, attention_dropout=dropout, **settings)
    train_step = tiny_train_step(encoder, objective, comm=comm, microbatch_tokens=tokens, sharded=comm.size > 1)
    table, values = documents(LENGTHS, 12), []
    start, end = len(table) * comm.rank // comm.size, len(table) * (comm.rank + 1) // comm.size
    for number in (1, 2, 3):
        batch = rank_batch(tiny_collator(objective), table, start, end, epoch=number)
        metrics = train_step.step({"": batch}, number)
        values += [metrics.loss, metrics.grad_norm]
    return values


@pytest.mark.parametrize("family", TRAINED)
def test_steps_are_those_of_the_padded_layout_and_microbatches_change_nothing_with_dropout(family):
    """Also where attention weights are written out by the family itself, and with DeBERTa's distances."""
    plain = losses_and_norms(family)
    assert deviation(plain, losses_and_norms(family, "padded")) < 1e-5
    pieces = losses_and_norms(family, tokens=60, dropout=0.2)
    whole = losses_and_norms(family, dropout=0.2) if family in KEYED else pieces
    assert deviation(pieces, whole) < 1e-6
    assert deviation(plain, whole) > 1e-3


@pytest.mark.parametrize("family", TRAINED)
def test_dropout_that_draws_from_torch_is_found(family):
    """Trying leaves torch's random numbers and the encoder as they were."""
    state = torch.random.get_rng_state()
    encoder = family_encoder(family, torch.float32, dropout=0.1, attention_dropout=0.1)
    layout = encoder.config.layout
    assert drops_by_key(encoder) == (family in KEYED)
    assert (encoder.training, encoder.config.layout) == (True, layout)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert drops_by_key(family_encoder(family, torch.float32, dropout=0.0))


def sharded(comm, families):
    return [losses_and_norms(family, tokens=160, comm=comm) for family in families]


@pytest.mark.dist
@pytest.mark.nightly
def test_every_family_can_be_sharded():
    families = [family for family in TRAINED if family not in ("xlm-roberta", "camembert")]  # RoBERTa's own layers
    single = sharded(None, families)
    for by_family in run_group(2, sharded, families):
        for family, its, expected in zip(families, by_family, single, strict=True):
            assert deviation(its, expected) < 1e-5, family


def test_family_that_cannot_be_trained_or_is_no_encoder_is_refused_by_name():
    assert set(FAMILIES) == set(TRAINED), "messages name the tested families"
    for family in REFUSED:
        with pytest.raises(EncoderError, match=all_of(f"model type {family}", "another encoder")):
            family_encoder(family)
    for family, shape in OTHERS.items():
        config = EncoderConfig(from_config={"model_type": family, **shape})
        with pytest.raises(EncoderError, match=all_of(f"model type {family}", "encoder", "roberta, xlm-roberta")):
            load_hf_config(config, 64, {})


def test_draws_of_a_layer_a_head_that_is_not_the_models_and_layers_that_join_spans_are_found():
    encoder = tiny_encoder("bert", torch.float32)
    assert drops_by_key(encoder)
    between = encoder.model.base_model.encoder.layer[0].output
    draw = between.register_forward_hook(lambda *call: torch.nn.functional.dropout(call[2], 0.1, call[0].training))
    assert not drops_by_key(encoder)
    draw.remove()
    encoder.model.register_forward_hook(lambda *call: setattr(call[2], "logits", call[2].logits * 2))
    with pytest.raises(EncoderError, match=all_of("MLM head", "without MLM")):
        fitting_layout(encoder, mlm=True)
    assert fitting_layout(encoder, mlm=False) == "packed"
    between.register_forward_hook(lambda *call: call[2] - call[2].mean(dim=(0, 1)))  # as a batch norm does
    with pytest.raises(EncoderError, match=all_of("model type bert", "other spans")):
        fitting_layout(encoder, mlm=False)
