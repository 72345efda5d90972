"""Every family of encoders: the layout it is trained in, no leaks between spans, a loss that is transformers' own."""

import math

import pytest
import torch
from families import OTHERS, PACKED, PADDED, REFUSED, TRAINED
from groups import run_group
from measures import deviation
from messages import all_of
from tiny import HALF, documents, family_encoder, random_spans, rank_batch, tiny_collator, tiny_encoder, tiny_train_step

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


@pytest.mark.parametrize("range_", [0.02, 0.3])
@pytest.mark.parametrize("family", TRAINED)
def test_fitting_layout_is_packed_where_it_is_exact(family, range_):
    """Also with new weights, whose attention hardly differs from a mean. Trying leaves no trace.

    Neither in the encoder, nor in torch's random numbers.
    """
    state = torch.random.get_rng_state()
    shape = {"model_type": family, **TRAINED[family], "initializer_range": range_}
    encoder = tiny_encoder("bert", torch.float32, from_config=shape, dropout=0.1)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    wanted = "packed" if family in PACKED else "padded"
    assert fitting_layout(encoder, mlm=True) == wanted
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
        found = encoder.embed(SpanBatch(ids, batch.lengths, batch.selected, batch.labels))
        others = [i for i in range(batch.num_spans) if i != changed]
        assert deviation([found[others]], [expected[others]]) < 1e-10
        assert deviation([found[changed]], [expected[changed]]) > 1e-4


@pytest.mark.parametrize("family", TRAINED)
def test_the_loss_is_the_whole_models(family):
    """Summed over the selected tokens, as transformers' own masked language model gives it for padded spans."""
    encoder, batch = family_encoder(family), random_spans(MIXED, num_selected=9)
    ids, mask = as_rows(batch.input_ids, batch, 1), padding_mask(batch)
    labels = torch.full_like(batch.input_ids, -100)
    labels[batch.selected] = batch.labels
    rows = torch.full_like(ids, -100).masked_scatter(mask, labels)
    whole = encoder.model
    padded = encoder.config.model_copy(update={"layout": "padded"})
    found = encoder(batch)[1]
    encoder.set_layout(padded)
    expected = whole(input_ids=ids, attention_mask=mask.long(), labels=rows).loss * len(batch.labels)
    assert deviation([found], [expected]) < 1e-6


@pytest.mark.parametrize("family", TRAINED)
def test_an_export_loads_as_it_was(tmp_path, family):
    from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedTokenizerFast

    encoder, batch = family_encoder(family, torch.float32).eval(), random_spans(MIXED, num_selected=9)
    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    write_encoder(encoder, tokenizer, tmp_path)
    expected, loss = encoder(batch)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loaded[1].values())
    again = type(encoder)(encoder.config, loaded[0], 0).eval()
    assert deviation(again(batch), [expected, loss]) < 1e-6
    ids, mask = as_rows(batch.input_ids, batch, 1), padding_mask(batch)
    hidden = AutoModel.from_pretrained(tmp_path).eval()(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    assert deviation([means], [expected]) < 1e-5


def taken(comm, family, layout, tokens, dropout, steps):
    """Losses and gradient norms of some steps, in a layout or, without one, in that which fits."""
    objective = DeclutrConfig(masking=HALF)
    dtype = torch.float32 if family == "longformer" else torch.float64  # transformers' own gives NaN in float64
    settings = {"layout": layout} if layout else {}
    encoder = family_encoder(family, dtype, dropout=dropout, attention_dropout=dropout, **settings)
    train_step = tiny_train_step(encoder, objective, comm=comm, microbatch_tokens=tokens, sharded=comm.size > 1)
    table = documents(LENGTHS, 12)
    start, end = len(table) * comm.rank // comm.size, len(table) * (comm.rank + 1) // comm.size
    found = []
    for number in range(1, steps + 1):
        measured = train_step.step({"": rank_batch(tiny_collator(objective), table, start, end, epoch=number)}, number)
        found += [measured.loss, measured.grad_norm]
    return found


@pytest.mark.parametrize("family", TRAINED)
def test_steps_are_those_of_the_padded_layout(family):
    reference = taken(Communicator(), family, "padded", None, 0.0, 3)
    assert all(map(math.isfinite, reference))
    assert deviation(taken(Communicator(), family, None, None, 0.0, 3), reference) < 1e-5


KEYED = [family for family in TRAINED if family != "longformer"]


@pytest.mark.parametrize("family", KEYED)
def test_microbatches_change_nothing_with_dropout(family):
    """Also where attention weights are written out by the family itself, and with DeBERTa's distances."""
    whole = taken(Communicator(), family, None, None, 0.2, 2)
    assert deviation(taken(Communicator(), family, None, 60, 0.2, 2), whole) < 1e-6
    assert deviation(taken(Communicator(), family, None, None, 0.0, 2), whole) > 1e-3


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


def test_any_draw_is_found():
    encoder = tiny_encoder("bert", torch.float32)
    between = encoder.model.base_model.encoder.layer[0].output
    between.register_forward_hook(lambda *given: torch.nn.functional.dropout(given[2], 0.1, given[0].training))
    assert not drops_by_key(encoder)


@pytest.mark.parametrize("family", PADDED)
def test_dropout_of_padded_families_trains(family):
    assert all(map(math.isfinite, taken(Communicator(), family, None, 60, 0.2, 2)))


def sharded(comm, families):
    """Microbatches of 160 tokens: every one is an exchange for each layer."""
    return [taken(comm, family, None, 160, 0.0, 2) for family in families]


@pytest.mark.dist
@pytest.mark.nightly
def test_every_family_can_be_sharded():
    families = [family for family in TRAINED if family not in ("xlm-roberta", "camembert")]  # RoBERTa's own layers
    single = sharded(Communicator(), families)
    for found in run_group(2, sharded, families):
        for family, its, expected in zip(families, found, single, strict=True):
            assert deviation(its, expected) < 1e-5, family


@pytest.mark.parametrize("family", REFUSED)
def test_family_that_cannot_be_trained_is_refused_by_name(family):
    with pytest.raises(EncoderError, match=all_of(f"model type {family}", "another encoder")):
        family_encoder(family)


@pytest.mark.parametrize("family", OTHERS)
def test_model_that_is_no_encoder_is_refused(family):
    config = EncoderConfig(from_config={"model_type": family, **OTHERS[family]})
    with pytest.raises(EncoderError, match=all_of(f"model type {family}", "encoder", "roberta, xlm-roberta")):
        load_hf_config(config, 64, {})


def test_a_head_that_is_not_the_models_is_found_out():
    encoder = tiny_encoder("bert", torch.float32)
    encoder.model.register_forward_hook(lambda *given: setattr(given[2], "logits", given[2].logits * 2))
    with pytest.raises(EncoderError, match=all_of("MLM head", "without MLM")):
        fitting_layout(encoder, mlm=True)
    assert fitting_layout(encoder, mlm=False) == "packed"


def test_a_batch_norm_is_refused():
    """Whatever joins the spans of a batch."""
    encoder = tiny_encoder("bert", torch.float32)
    mixing = encoder.model.base_model.encoder.layer[0].output
    mixing.register_forward_hook(lambda *given: given[2] - given[2].mean(dim=(0, 1)))
    with pytest.raises(EncoderError, match=all_of("model type bert", "other spans")):
        fitting_layout(encoder, mlm=False)


def test_the_tested_families_are_those_that_messages_name():
    assert set(FAMILIES) == set(TRAINED)
