"""One optimizer step: however the batch is cut and shared out, loss and gradient are those of the whole."""

import copy
import dataclasses
import functools

import pytest
import torch
from groups import run_group
from measures import deviation
from messages import all_of, says
from tiny import HALF, OBJECTIVES, SHORT_LENGTHS, documents, rank_batch, tiny_collator, tiny_encoder, tiny_train_step
from tiny import contrastive as contrastive_loss

from declutr.common import seeding
from declutr.pipeline.shards.shards import document_keys
from declutr.trainer.data.plan import Plan
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.step import NonFiniteLossError

LENGTHS = [48, 70, 49, 131, 60]
PROJECTION = {"projection": {"kind": "mlp", "size": 6}}
MODES = tuple(SHORT_LENGTHS)


def setup(objective, lengths=LENGTHS, dtype=torch.float64, encoder=None, start=0, end=None, mode="drop", **settings):
    config = DeclutrConfig(**objective)
    train_step = tiny_train_step(tiny_encoder(dtype=dtype, **(encoder or PROJECTION)), config, **settings)
    if config.queue_size:
        rows = torch.randn(9, train_step.encoder.embedding_size, generator=torch.Generator().manual_seed(5))
        train_step.tasks[0].objective.queue = rows.to(dtype)
    table = documents(lengths, 12, mode=mode)
    if config.queue_size and config.excludes_same_document:  # some of the queue belong to documents of the batch
        owners = torch.from_numpy(document_keys(table).view("int64")).repeat(9)[:9]
        train_step.tasks[0].objective.queue_documents = owners + torch.tensor([0, 1] * 5)[:9]
    return train_step, rank_batch(tiny_collator(config, mode=mode), table, start, end)


def or_zeros(found, like):
    return [torch.zeros_like(b) if a is None else a for a, b in zip(found, like, strict=True)]


def same_parameters(encoder, before):
    pairs = zip(encoder.parameters(), before, strict=True)
    return all(torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0)) for now, then in pairs)


def gradients(train_step, batch, step=1):
    """Contrastive loss, this rank's MLM sum, selected tokens, and all gradients, summed over ranks."""
    train_step.optimizer.zero_grad()
    [found] = train_step.gradients({"": batch}, step)
    contrastive = found.terms.get("contrastive", torch.zeros(())).item()
    parameters = list(train_step.encoder.parameters())
    train_step.comm.all_reduce_gradients(parameters)
    mlm_sum = train_step.comm.all_reduce_sum(found.mlm_sum).item()
    return contrastive, mlm_sum, found.num_selected, [p.grad.clone() for p in parameters]


def apart(found, expected):
    assert found[2] == expected[2]
    return max(deviation(found[:2], expected[:2]), deviation(found[3], expected[3]))


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=list(OBJECTIVES))
@pytest.mark.parametrize(("layout", "mode"), [("packed", "drop"), ("padded", "drop"), *(("packed", m) for m in MODES)])
def test_microbatches_do_not_change_the_gradient(objective, layout, mode):
    how = {"encoder": {"layout": layout, **PROJECTION}, "mode": mode, "lengths": SHORT_LENGTHS.get(mode, LENGTHS)}
    whole = gradients(*setup(objective, **how))
    assert max(gradient.abs().max() for gradient in whole[3]) > 0
    for tokens in (14, 60):
        train_step, batch = setup(objective, **how, microbatch_tokens=tokens)
        assert len(batch.spans.microbatches(tokens)) > 1
        assert apart(gradients(train_step, batch), whole) < 1e-10


def test_both_terms_are_a_sum():
    """The gradient of both is that of one plus that of the other, on the same spans and masks."""
    train_step, batch = setup({"masking": HALF})
    both = gradients(train_step, batch)
    embeddings, mlm_sum = train_step.encoder(batch.spans)
    objective = train_step.tasks[0].objective
    contrastive = contrastive_loss(objective, objective.views(embeddings, batch))
    assert both[0] == contrastive.item()
    parameters = list(train_step.encoder.parameters())
    expected = torch.autograd.grad(contrastive + mlm_sum / len(batch.spans.labels), parameters, allow_unused=True)
    assert deviation(both[3], or_zeros(expected, parameters)) < 1e-12


def test_released_scaling_is_a_number_that_one_worker_repeats():
    """The gradient is mlm + contrastive / 4 whatever the number of workers; null is off."""
    off, scaled = (gradients(*setup({"masking": HALF, "reference_rank_scaling": number})) for number in (None, 4))
    mlm = gradients(*setup({"masking": HALF, "reference_rank_scaling": 10**12}))
    assert scaled[0] == off[0]  # the loss that is shown is not divided
    assert deviation(scaled[3], [m + (g - m) / 4 for g, m in zip(off[3], mlm[3], strict=True)]) < 1e-10
    assert deviation(scaled[3], off[3]) > 1e-2


def dropped_out(tokens, **encoder):
    return setup({"masking": HALF}, encoder={"dropout": 0.3, **PROJECTION, **encoder}, microbatch_tokens=tokens)


@pytest.mark.parametrize("encoder", [{}, {"attention_dropout": 0.0, "layout": "padded"}], ids=["packed", "padded"])
def test_dropout_belongs_to_tokens_not_to_microbatches(encoder):
    """Attention dropout included; the padded layout has torch's own there, which belongs to the microbatch."""
    whole = gradients(*dropped_out(None, **encoder))
    assert apart(gradients(*setup({"masking": HALF})), whole) > 1e-2  # it does drop something
    for tokens in (14, 40):
        assert apart(gradients(*dropped_out(tokens, **encoder)), whole) < 1e-10


def test_packed_and_padded_drop_the_same():
    layouts = (gradients(*dropped_out(40, attention_dropout=0.0, layout=layout)) for layout in ("packed", "padded"))
    assert apart(*layouts) < 1e-10


def test_dropout_differs_from_epoch_to_epoch():
    train_step, first = dropped_out(None)
    second = rank_batch(tiny_collator(train_step.tasks[0].objective.config), documents(LENGTHS, 12), epoch=1)
    same_spans = dataclasses.replace(first, spans=dataclasses.replace(first.spans, keys=second.spans.keys))
    assert apart(gradients(train_step, same_spans), gradients(train_step, first)) > 1e-3


def test_the_padded_layouts_second_pass_replays_torchs_dropout():
    """Two passes equal one graph through all the pieces, each with its own seeded attention dropout."""
    train_step, batch = dropped_out(40, layout="padded")
    pieces = batch.spans.microbatches(40)
    two_passes = gradients(train_step, batch)
    outputs = []
    for number, piece in enumerate(pieces):
        torch.manual_seed(seeding.torch_seed(0, "dropout", 1, 0, number))
        outputs.append(train_step.encoder(piece))
    embeddings, mlm_sum = torch.cat([e for e, _ in outputs]), sum(loss for _, loss in outputs)
    objective = train_step.tasks[0].objective
    contrastive = contrastive_loss(objective, objective.views(embeddings, batch))
    train_step.optimizer.zero_grad()
    (contrastive + mlm_sum / two_passes[2]).backward()
    one_graph = or_zeros([p.grad for p in train_step.encoder.parameters()], two_passes[3])
    assert deviation(two_passes[:2], [contrastive, mlm_sum]) < 1e-12
    assert deviation(two_passes[3], one_graph) < 1e-10


def test_a_step_leaves_the_global_generator_alone():
    train_step, batch = dropped_out(40)
    state = torch.random.get_rng_state()
    train_step.step({"": batch}, 1)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_step_without_selected_tokens_has_no_mlm_loss():
    train_step, batch = setup({"masking": {"mlm_probability": 0.0}})
    metrics = train_step.step({"": batch}, 1)
    assert metrics.terms["mlm"] == 0.0
    assert metrics.num_selected == 0
    assert metrics.loss == metrics.terms["contrastive"] > 0
    only_mlm, batch = setup({"terms": "mlm", "masking": {"mlm_probability": 0.0}})
    assert only_mlm.step({"": batch}, 1).loss == 0.0


@pytest.mark.parametrize("tokens", [None, 40])
@pytest.mark.parametrize("objective", [OBJECTIVES["queue"], OBJECTIVES["mlm"]], ids=["both", "mlm"])
def test_a_loss_that_is_not_finite_updates_nothing(objective, tokens):
    train_step, batch = setup(objective, microbatch_tokens=tokens)
    train_step.step({"": batch}, 1)
    with torch.no_grad():
        train_step.encoder.model.base_model.embeddings.LayerNorm.bias[0] = float("nan")
    queue = copy.deepcopy(train_step.tasks[0].objective.queue)
    before = [p.detach().clone() for p in train_step.encoder.parameters()]
    moments = [s["exp_avg"].clone() for s in train_step.optimizer.state.values()]
    with pytest.raises(NonFiniteLossError, match=all_of("step 2", "loss nan", "nothing was updated", "optim.lr")):
        train_step.step({"": batch}, 2)
    assert same_parameters(train_step.encoder, before)
    assert all(torch.equal(s["exp_avg"], m) for s, m in zip(train_step.optimizer.state.values(), moments, strict=True))
    assert queue is None or torch.equal(train_step.tasks[0].objective.queue, queue)


def test_training_lowers_the_loss():
    """Twenty steps on one batch, bias-corrected AdamW: both terms fall."""
    optim = OptimConfig(lr=1e-2)
    train_step, batch = setup({"masking": HALF}, optim=optim, total_steps=20, encoder={})
    metrics = [train_step.step({"": batch}, step) for step in range(1, 21)]
    assert metrics[-1].terms["contrastive"] < 0.85 * metrics[0].terms["contrastive"]
    assert metrics[-1].terms["mlm"] < 0.85 * metrics[0].terms["mlm"]
    assert metrics[0].lr < metrics[1].lr == 1e-2 > metrics[2].lr > metrics[-1].lr


def test_metrics_count_what_was_computed():
    for layout in ("packed", "padded"):
        train_step, batch = setup({"masking": HALF}, encoder={"layout": layout}, microbatch_tokens=150)
        metrics = train_step.step({"": batch}, 1)
        assert metrics.num_tokens == batch.spans.num_tokens
        assert metrics.num_selected == len(batch.spans.labels)
        places = sum(len(p.lengths) * int(p.lengths.max()) for p in batch.spans.microbatches(150))
        expected = 0.0 if layout == "packed" else 1 - batch.spans.num_tokens / places
        assert metrics.padding_share == pytest.approx(expected, abs=1e-12)
    assert expected > 0.05


@pytest.mark.parametrize("tokens", [None, 40])
def test_autocast_changes_the_forward_alone(tokens):
    """bfloat16 products: gradients of float32 parameters within its precision of the float32 ones."""
    exact = gradients(*setup({"masking": HALF}, dtype=torch.float32))
    low = gradients(*setup({"masking": HALF}, dtype=torch.float32, autocast=torch.bfloat16, microbatch_tokens=tokens))
    assert 1e-5 < apart(low, exact) < 0.2
    flat, flat_low = (torch.cat([g.flatten() for g in found[3]]) for found in (exact, low))
    assert torch.cosine_similarity(flat, flat_low, dim=0) > 0.99


def rank_results(comm, cases):
    """This rank's view of each case: summed gradients, and after one more full step the metrics and parameters."""
    results = []
    for objective, lengths, tokens, mode in cases:
        start, end = Plan(0, len(lengths), len(lengths)).slice(comm.rank, comm.size)
        encoder = {"dropout": 0.2, **PROJECTION}
        given = {"comm": comm, "microbatch_tokens": tokens, "start": start, "end": end, "encoder": encoder}
        train_step, batch = setup(objective, lengths, mode=mode, **given)
        found = gradients(train_step, batch)
        metrics = train_step.step({"": batch}, 1)
        parameters = [p.detach().clone() for p in train_step.encoder.parameters()]
        results.append((found, metrics, parameters, train_step.tasks[0].objective.queue))
    return results


WHOLE = ("both", "mlm", "by name")
DIST_CASES = [
    *((objective, LENGTHS, 60, "drop") for objective in OBJECTIVES.values()),
    *((OBJECTIVES[name], LENGTHS, None, "drop") for name in WHOLE),
    *((objective, SHORT_LENGTHS[mode], 40, mode) for objective in OBJECTIVES.values() for mode in MODES),
    # With 3 ranks one has no document.
    *((OBJECTIVES[name], LENGTHS[:2], tokens, "drop") for name in WHOLE for tokens in (None, 60)),
    *((OBJECTIVES["both"], SHORT_LENGTHS[mode][:2], None, mode) for mode in MODES),
]


@functools.cache
def single_results():
    return rank_results(Communicator(), DIST_CASES)


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks_takes_the_same_step(size):
    """5 documents over 2 and 3 ranks, 2 over 3; whole, microbatched, short; every objective; with dropout."""
    ranks = run_group(size, rank_results, DIST_CASES)
    for number, (expected, metrics, parameters, queue) in enumerate(single_results()):
        case = DIST_CASES[number]
        for results in ranks:
            found, its_metrics, its_parameters, its_queue = results[number]
            assert apart(found, expected) < 1e-10, case
            assert its_metrics.loss == pytest.approx(metrics.loss, rel=1e-10), case
            assert its_metrics.grad_norm == pytest.approx(metrics.grad_norm, rel=1e-10), case
            for name in ("num_tokens", "num_selected", "flops", "lr"):
                assert getattr(its_metrics, name) == getattr(metrics, name), case
            assert its_metrics.terms == pytest.approx(metrics.terms, rel=1e-10), case
            assert deviation(its_parameters, parameters) < 1e-10, case
            assert (queue is None) == (its_queue is None)
            assert queue is None or deviation([its_queue], [queue]) < 1e-10, case
        for results in ranks[1:]:  # replicas may not drift apart by even one bit
            assert all(torch.equal(a, b) for a, b in zip(ranks[0][number][2], results[number][2], strict=True))


def scaled_and_failed(comm):
    """Gradients by scaling; then one rank's loss is not finite: every rank must stop, none may wait for the others."""
    start, end = Plan(0, len(LENGTHS), len(LENGTHS)).slice(comm.rank, comm.size)
    found = [
        gradients(*setup({**OBJECTIVES[name], "reference_rank_scaling": scaled}, comm=comm, start=start, end=end))
        for name in ("contrastive", "mlm")
        for scaled in (None, 4)
    ]
    train_step, batch = setup({"terms": "mlm", "masking": HALF}, comm=comm, start=start, end=end)
    if comm.rank == 1:
        with torch.no_grad():
            train_step.encoder.model.base_model.embeddings.LayerNorm.bias[0] = float("nan")
    before = [p.detach().clone() for p in train_step.encoder.parameters()]
    with pytest.raises(NonFiniteLossError) as stopped:
        train_step.step({"": batch}, 1)
    return found, str(stopped.value), same_parameters(train_step.encoder, before)


@pytest.mark.dist
def test_two_ranks_scale_as_released_and_fail_together():
    for (contrastive, contrastive_scaled, mlm, mlm_scaled), message, same in run_group(2, scaled_and_failed):
        assert contrastive_scaled[0] == contrastive[0]  # the loss that is shown is not scaled
        assert deviation([4 * g for g in contrastive_scaled[3]], contrastive[3]) < 1e-12
        assert deviation(mlm_scaled[3], mlm[3]) == 0
        says(message, "step 1", "loss nan")
        assert same


def test_a_late_rank_does_not_shift_its_documents():
    """Spans of documents 2..4 alone are those of the global batch: the seed and the document decide, not the place."""
    collator, table = tiny_collator(DeclutrConfig(masking=HALF)), documents(LENGTHS, 12)
    part, whole = rank_batch(collator, table, 2), rank_batch(collator, table)
    anchors = part.spans.lengths[:6].sum()
    before = int(whole.spans.lengths[:4].sum())
    assert torch.equal(part.spans.input_ids[:anchors], whole.spans.input_ids[before : before + anchors])
    assert (part.num_documents, part.num_rows) == (3, 6)
