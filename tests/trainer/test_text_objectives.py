"""SimCSE, SCD and SCL: gradients for any number of workers and microbatches, the order of a batch, keys and draws."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from groups import run_group
from measures import apart
from rows import sentences, text_rows
from tiny import HALF, VOCABULARY, tiny_encoder, tiny_train_step, with_task

from declutr.common.errors import UsageError
from declutr.trainer.checkpoints.weights import collect, step_parameters
from declutr.trainer.data.batches import collated
from declutr.trainer.data.plan import Plan
from declutr.trainer.objectives.base import SHARED_ROWS, Gathered
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.simcse import Simcse
from declutr.trainer.objectives.text_config import ScdConfig, SclConfig, SimcseConfig
from declutr.trainer.objectives.texts import Scd, Scl
from declutr.trainer.parallel.communicator import Communicator, full_tensor
from declutr.trainer.parallel.reducers import FixedPointReducer
from declutr.trainer.step.config import OptimConfig

SENTENCES = sentences([5, 12, 30, 7, 3, 1, 18])
PAIRS = text_rows(
    [
        [(5, -1), (4, 0), (9, 2), (3, 1)],
        [(11, -1), (6, 2), (2, 0)],
        [(3, -1), (7, 0), (5, 0), (8, 2), (30, 1)],
        [(9, -1), (1, 2), (4, 0)],
        [(2, -1), (5, 0), (7, 2)],
    ]
)
SIZES = {"sizes": [4, "all", 9], "weights": [0.5, 1.0, 2.0]}
CASES = {
    "simcse": (Simcse, SimcseConfig(temperature=0.2), SENTENCES),
    "simcse with mlm": (Simcse, SimcseConfig(temperature=0.2, mlm_loss_weight=0.1, masking=HALF), SENTENCES),
    "simcse with mlm on all copies": (
        Simcse,
        SimcseConfig(supervised=True, temperature=0.2, mlm_loss_weight=0.1, mlm_copies="all", masking=HALF),
        PAIRS,
    ),
    "simcse supervised": (Simcse, SimcseConfig(supervised=True, temperature=0.2, hard_negative_weight=0.7), PAIRS),
    "scd": (Scd, ScdConfig(projector=[12, 8], decorrelation_weight=0.5), SENTENCES),
    "scd, attention apart": (Scd, ScdConfig(projector=[6], attention_dropout_rates=(0.2, 0.0)), SENTENCES),
    "scl": (Scl, SclConfig(contrastive_weight=0.4), PAIRS),
    "simcse with sizes": (Simcse, SimcseConfig(temperature=0.2, matryoshka=SIZES), SENTENCES),
    "simcse supervised with sizes": (Simcse, SimcseConfig(supervised=True, temperature=0.2, matryoshka=SIZES), PAIRS),
    "scd with sizes": (Scd, ScdConfig(projector=[12, 8], decorrelation_weight=0.5, matryoshka=SIZES), SENTENCES),
    "scl with sizes": (Scl, SclConfig(contrastive_weight=0.4, matryoshka=SIZES), PAIRS),
    "scl with draws": (Scl, SclConfig(contrastive_weight=0.4, positives=2, negatives=3), PAIRS),
}


def objective_of(name, size=16, **changes):
    kind, config, rows = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        objective = kind(config.model_copy(update=changes), RunContext(batch_documents=len(rows)), size)
    return objective.double().train()


def setup(name, comm=None, tokens=None, sharded=False, rows=None, shared_rows=SHARED_ROWS, norm=1.0, **encoder):
    pooling = "mean_without_cls" if name == "scl" else "mean"
    settings = {"dropout": 0.2, "attention_dropout": 0.1, "pooling": pooling} | encoder
    objective = objective_of(name)
    given = {"comm": comm or Communicator(), "microbatch_tokens": tokens, "sharded": sharded, "loss": objective}
    given |= {"shared_rows": shared_rows}
    train_step = tiny_train_step(tiny_encoder(**settings), optim=OptimConfig(lr=1e-2, max_grad_norm=norm), **given)
    rows = CASES[name][2] if rows is None else rows
    start, end = Plan(0, len(rows), len(rows)).slice(train_step.comm.rank, train_step.comm.size)
    part = rows.slice(start, end - start)
    return train_step, objective.collator(VOCABULARY, 30).collate(part, np.full(end - start, 1))


def gradients(name, **how):
    """Gradients by name, and the terms."""
    train_step, batch = setup(name, **how)
    [found] = train_step.gradients({"": batch}, 1)
    parameters = step_parameters(train_step)
    train_step.comm.all_reduce_gradients(list(parameters.values()))
    terms = {name: value.item() for name, value in found.terms.items()}
    return {name: full_tensor(p.grad).clone() for name, p in parameters.items()}, terms


def two_steps(**how):
    """Norms of two steps of SCD, whose layers are behind the gather; then parameters, moments and statistics."""
    train_step, batch = setup("scd", **how)
    norms = [train_step.step({"": batch}, number).grad_norm for number in (1, 2)]
    return norms, collect([train_step])


STEPS = [{"tokens": tokens, "norm": norm} for tokens in (None, 40) for norm in (1.0, 1e-3)]


def every_case(comm, sharded, shared_rows):
    how = {"comm": comm, "sharded": sharded, "shared_rows": shared_rows}
    found = {name: [gradients(name, tokens=tokens, **how) for tokens in (None, 40)] for name in CASES}
    return found, [two_steps(**how, **case) for case in STEPS]


@pytest.fixture(scope="module")
def single():
    return {name: gradients(name) for name in CASES}


@pytest.fixture(scope="module")
def stepped():
    return [two_steps(**case) for case in STEPS]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("size", "sharded", "shared_rows"), [(2, False, SHARED_ROWS), (3, False, 0), (2, False, 0), (2, True, 0)]
)
def test_text_objectives_give_equal_steps_on_any_number_of_workers(single, stepped, size, sharded, shared_rows):
    """Dropout is on. Three workers share five rows unevenly; the pairs of a worker's rows differ in number.

    With `shared_rows` of 0, workers share the loss where its objective allows it.
    """
    for cases, steps in run_group(size, every_case, sharded, shared_rows):
        for (norms, contents), (expected_norms, expected) in zip(steps, stepped, strict=True):
            assert norms == pytest.approx(expected_norms, rel=1e-10)
            for file in expected:
                assert apart(contents[file], expected[file]) < 1e-7, file
        for name, results in cases.items():
            for found, terms in results:
                assert apart(found, single[name][0]) < 1e-10, name
                assert terms == pytest.approx(single[name][1], rel=1e-10), name


def test_statistics_do_not_depend_on_microbatches(stepped):
    whole, pieces = (
        {name: value for name, value in stepped[place][1]["objective.safetensors"].items() if "running" in name}
        for place in (0, 2)
    )
    assert len(whole) == 4
    assert apart(pieces, whole) < 1e-12


def bits(comm):
    """Parameters after two steps with fixed-point sums, and the lines of the steps, by case."""
    comm, found = replace(comm, deterministic=True), {}
    for name, (_, _, rows) in CASES.items():
        train_step, _ = setup(name, comm)
        parameters = step_parameters(train_step)
        train_step = with_task(train_step, reducer=FixedPointReducer(comm, list(parameters.values()), 9))
        start, end = Plan(0, len(rows), len(rows), 1).slice(comm.rank, comm.size)
        collator, lines = train_step.tasks[0].objective.collator(VOCABULARY, 30), []
        for step in (1, 2):
            batch = collated(collator, rows.slice(start, end - start), np.full(end - start, step), start, 1)
            lines.append(train_step.step({"": batch}, step).line())
        state = train_step.tasks[0].objective.state()
        found[name] = {key: p.detach().clone() for key, p in parameters.items()}, state, lines
    return found


@pytest.mark.dist
def test_fixed_point_sums_have_the_same_bits_with_any_number_of_workers():
    """The objectives' layers and buffers too."""
    alone = bits(Communicator())
    for results in run_group(3, bits):
        for name, (parameters, state, lines) in results.items():
            assert all(torch.equal(parameters[key], value) for key, value in alone[name][0].items()), name
            assert all(torch.equal(state[key], value) for key, value in alone[name][1].items()), name
            assert lines == alone[name][2], name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_microbatches_layout_and_order_change_nothing(single, name, layout):
    """Permuting the rows permutes the views; nothing is drawn by their place."""
    rows = CASES[name][2]
    order = np.random.default_rng(1).permutation(len(rows))
    for how in ({"tokens": 40}, {"tokens": 1}, {"rows": rows.take(order).combine_chunks()}):
        found, terms = gradients(name, layout=layout, **how)
        assert apart(found, single[name][0]) < 1e-10, how
        assert terms == pytest.approx(single[name][1], rel=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_no_two_spans_share_a_dropout_key(name):
    _, batch = setup(name)
    assert len(batch.spans.keys.unique()) == batch.spans.num_spans


def test_texts_are_cut_with_their_specials():
    """32 tokens, as the papers count them."""
    rows = sentences([40, 30, 31, 5])
    spans = objective_of("simcse").collator(VOCABULARY, 500).collate(rows, np.zeros(4, np.int64)).spans
    assert spans.lengths.tolist() == [32, 32, 32, 32, 32, 32, 7, 7]
    assert spans.input_ids[:32].tolist() == [0, *rows["tokens"][0].as_py()[:30], 2]


def test_a_row_without_texts_of_a_worker_takes_part():
    for name in CASES:
        collator, epochs = objective_of(name).collator(VOCABULARY, 30), np.empty(0, np.int64)
        batch = collator.collate(CASES[name][2].slice(0, 0), epochs)
        assert batch.spans.num_spans == batch.num_rows == 0
        whole = collator.collate(CASES[name][2], np.zeros(len(CASES[name][2]), np.int64))
        assert list(batch.facts) == list(whole.facts)


def test_hypotheses_change_with_the_epoch_and_not_with_the_batch():
    rows = text_rows([[(3, -1), *[(2, 0)] * 6, *[(2, 2)] * 5]] * 1)
    collator = objective_of("simcse supervised").collator(VOCABULARY, 30)
    chosen = []
    for epoch in range(40):
        ids = collator.collate(rows, np.array([epoch])).spans.input_ids
        chosen.append((tuple(ids[5:9].tolist()), tuple(ids[9:].tolist())))
        assert torch.equal(ids, collator.collate(rows, np.array([epoch])).spans.input_ids)
    assert len({first for first, _ in chosen}) == 6
    assert len({second for _, second in chosen}) == 5


def test_the_masked_copy_is_the_sentence_and_no_view():
    _, batch = setup("simcse with mlm")
    spans, rows = batch.spans, len(SENTENCES)
    assert spans.num_spans == 3 * rows
    assert batch.views.max() == 2 * rows - 1
    first_masked = spans.lengths[: 2 * rows].sum()
    assert spans.selected.min() >= first_masked
    restored = spans.input_ids.clone()
    restored[spans.selected] = spans.labels
    pieces = restored.split(spans.lengths.tolist())
    assert all(torch.equal(pieces[2 * row], pieces[2 * rows + row]) for row in range(rows))


def test_every_view_is_copied_with_its_own_mask():
    """As released: 3 n copies behind the 3 n views, each the text of its view; copies differ by their masks."""
    _, batch = setup("simcse with mlm on all copies")
    spans, views = batch.spans, batch.views.numel()
    assert spans.num_spans == 2 * views
    restored = spans.input_ids.clone()
    restored[spans.selected] = spans.labels
    pieces = restored.split(spans.lengths.tolist())
    assert all(torch.equal(one, copy) for one, copy in zip(pieces[:views], pieces[views:], strict=True))
    objective = objective_of("simcse with mlm", mlm_copies="all")
    spans = objective.collator(VOCABULARY, 30).collate(SENTENCES, np.full(len(SENTENCES), 1)).spans
    masked = spans.input_ids.split(spans.lengths.tolist())[2 * len(SENTENCES) :]
    assert not all(torch.equal(one, other) for one, other in zip(masked[::2], masked[1::2], strict=True))
    one_copy = setup("simcse with mlm")[1].spans
    first = one_copy.input_ids.split(one_copy.lengths.tolist())[2 * len(SENTENCES) :]
    assert all(torch.equal(one, other) for one, other in zip(masked[::2], first, strict=True))


def test_the_projector_starts_as_released():
    """Normal weights of 0.02 and biases of 0, as BERT's; without the setting, those of torch."""
    plain, released = (objective_of("scd", projector=[400, 300], initializer_range=std) for std in (None, 0.02))
    for layer, other in zip(released.projector, plain.projector, strict=True):
        if isinstance(layer, torch.nn.Linear):
            assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
            assert (layer.weight.abs() > 0.04).float().mean().item() == pytest.approx(0.0455, abs=0.006)  # normal
            assert layer.bias is None or not layer.bias.any()
            assert other.weight.abs().max() <= layer.in_features**-0.5


def test_the_weight_of_mlm_scales_its_part_of_the_gradient():
    """The gradient is that of contrastive + weight * mlm, and the reported mlm has no weight."""
    losses, found = {}, {}
    for weight in (0.1, 0.3, 0.5):
        train_step, batch = setup("simcse with mlm")
        objective = train_step.tasks[0].objective
        objective.config = objective.config.model_copy(update={"mlm_loss_weight": weight})
        train_step.gradients({"": batch}, 1)
        found[weight] = {n: p.grad.clone() for n, p in train_step.encoder.named_parameters() if p.grad is not None}
        metrics = train_step.step({"": batch}, 1)
        losses[weight] = metrics.terms["mlm"]
        assert metrics.loss == pytest.approx(metrics.terms["contrastive"] + weight * metrics.terms["mlm"], rel=1e-12)
    assert losses[0.1] == losses[0.5]
    for name in found[0.1]:
        torch.testing.assert_close(found[0.3][name], (found[0.1][name] + found[0.5][name]) / 2)


def pairs(views, labels, premises, step=1):
    facts = {"label": torch.tensor(labels), "premise": torch.tensor(premises)}
    return Gathered(views, facts | {"hypothesis": torch.arange(len(labels)) * 7}, step=step)


def test_scl_draws_the_numbers_it_is_told_and_always_its_own():
    """Three entailed hypotheses and five others; with one positive, only the anchor's own remains."""
    views = torch.randn(8, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels, premises = [0, 0, 0, 1, 2, 1, 2, 1], [5] * 8

    def used(**changes):
        views.grad = None
        objective = objective_of("scl with draws", contrastive_weight=1.0, **changes)
        objective.loss(pairs(views, labels, premises))["contrastive"].backward()
        return int((views.grad[:, 1].abs().sum(1) > 0).sum())

    assert used(positives=1, negatives=1) >= 3 + 1
    assert used(positives="all", negatives="all") == 8
    objective = objective_of("scl", contrastive_weight=1.0, positives=1, negatives=2)
    found = {round(objective.loss(pairs(views, labels, premises, step))["contrastive"].item(), 9) for step in range(20)}
    assert len(found) > 5  # other negatives in other steps
    u, v = views.detach().unbind(1)
    own = (u[0] @ v[0]).item()
    alone = pairs(views.detach()[[0, 3]], [0, 1], [5, 5])
    expected = np.logaddexp(own, (u[0] @ v[3]).item()) - own
    assert objective.loss(alone)["contrastive"].item() == pytest.approx(expected, rel=1e-12)


def test_equal_premises_of_two_rows_are_one_premise():
    """As in the released code, which compares their tokens: files are grouped one by one, so a premise may recur."""
    row = PAIRS.slice(0, 1).to_pydict()
    other = {**row, "id": [b"another row's id"]}
    rows = pa.concat_tables([pa.table(each, PAIRS.schema) for each in (row, other, PAIRS.slice(1, 1).to_pydict())])
    batch = objective_of("scl").collator(VOCABULARY, 30).collate(rows.combine_chunks(), np.zeros(3, np.int64))
    premises = batch.facts["premise"].tolist()
    assert premises[:3] == premises[3:6] != premises[6:9]
    assert len(batch.facts["hypothesis"].unique()) == len(premises)


def test_scl_without_contrast_is_cross_entropy():
    views = torch.randn(4, 2, 16, dtype=torch.float64)
    objective = objective_of("scl", contrastive_weight=0.0)
    terms = objective.loss(pairs(views, [0, 1, 2, 0], [1, 1, 2, 3]))
    u, v = views.unbind(1)
    logits = objective.classifier(torch.cat([u, v, (u - v).abs()], dim=1))
    assert set(terms) == {"classification"}
    assert terms["classification"].item() == F.cross_entropy(logits, torch.tensor([0, 1, 2, 0])).item()


def test_heads_are_exported_as_released():
    assert objective_of("simcse").exported() == []
    (dense,) = objective_of("simcse supervised").exported()
    assert isinstance(dense[1], torch.nn.Tanh)
    assert objective_of("simcse supervised", head=False).exported() == []
    assert objective_of("scd").exported() == objective_of("scl").exported() == []


@pytest.mark.parametrize("name", ["simcse", "scd"])
def test_views_with_one_dropout_key_are_refused(name):
    """Equal keys with two rates would nest one view's mask in the other's, which no loss shows."""
    train_step, batch = setup(name)
    first = batch.spans.keys[torch.arange(len(batch.spans.keys)) // 2 * 2]
    with pytest.raises(UsageError, match="same dropout key"):
        train_step.step({"": replace(batch, spans=replace(batch.spans, keys=first))}, 1)


def test_scd_drops_each_view_at_its_own_rates():
    """The first rate of a pair is that of the first view; hidden states and attention weights have separate pairs."""
    objective = objective_of("scd", dropout_rates=(0.1, 0.2), attention_dropout_rates=(0.3, 0.4))
    batch = objective.collator(VOCABULARY, 30).collate(SENTENCES, np.zeros(7, np.int64))
    assert batch.spans.rates.tolist() == [[0.1, 0.3], [0.2, 0.4]] * 7
    hidden_only = objective_of("scd", dropout_rates=(0.0, 0.5), attention_dropout_rates=(0.0, 0.0))
    spans = hidden_only.collator(VOCABULARY, 30).collate(SENTENCES, np.zeros(7, np.int64)).spans
    encoder = tiny_encoder(dropout=0.2, attention_dropout=0.2)
    with torch.no_grad():
        views, whole_views = encoder(spans)[0].view(7, 2, -1), encoder.eval()(spans)[0].view(7, 2, -1)
    torch.testing.assert_close(views[:, 0], whole_views[:, 0])
    assert not torch.isclose(views[:, 1], whole_views[:, 1]).all(1).any()


@pytest.mark.parametrize("name", ["simcse", "scd", "simcse supervised"])
def test_each_epoch_drops_anew(name):
    rows = CASES[name][2]
    collator = objective_of(name).collator(VOCABULARY, 30)
    keys = [collator.collate(rows, np.full(len(rows), epoch)).spans.keys for epoch in (0, 1, 0)]
    assert (keys[0] != keys[1]).all()
    assert torch.equal(keys[0], keys[2])


def test_equal_views_drop_the_same_features_and_others_do_not():
    spans = {}
    for equal in (True, False):
        objective = Simcse(SimcseConfig(equal_views=equal), RunContext(), 16)
        spans[equal] = objective.collator(VOCABULARY, 30).collate(SENTENCES, np.zeros(len(SENTENCES), np.int64)).spans
        assert objective.config.needs_dropout is not equal
    keys = {equal: one.keys.view(-1, 2) for equal, one in spans.items()}
    assert keys[True][:, 0].equal(keys[True][:, 1])
    assert keys[True][:, 0].equal(keys[False][:, 0])
    assert not (keys[False][:, 0] == keys[False][:, 1]).any()
