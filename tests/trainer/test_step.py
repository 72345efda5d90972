"""One optimizer step: losses that are not finite, metrics, AdamW and its rates, layers of an objective, wrong terms.

test_gradients.py has the law that a step is equal however its batch is cut.
"""

import copy
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from cases import CASES, LENGTHS, PROJECTION, SENTENCES, collator_of, train_steps_of
from groups import run_group
from measures import deviation
from messages import all_of, says
from tiny import HALF, documents, rank_batch, tiny_collator, tiny_encoder, tiny_train_step
from tinyruns import least_config, state_of, train_config, word_shards
from torch import nn
from transformers import get_scheduler

from declutr.common import seeding
from declutr.common.errors import CheckpointError, UsageError
from declutr.trainer import verify
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.weights import collect, load
from declutr.trainer.objectives.base import Objective
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.parallel.reducers import BucketedReducer
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.gradcache import GradCache, Microbatch
from declutr.trainer.step.optim import UncorrectedAdamW, learning_rate, parameter_groups
from declutr.trainer.step.step import NonFiniteLossError


def setup(objective, dtype=torch.float64, encoder=PROJECTION, **settings):
    config = DeclutrConfig(**objective)
    train_step = tiny_train_step(tiny_encoder(dtype=dtype, **encoder), config, **settings)
    return train_step, rank_batch(tiny_collator(config), documents(LENGTHS, 12))


def gradients(train_step, batch):
    """Contrastive loss, sum of MLM, selected tokens, and all gradients."""
    train_step.optimizer.zero_grad()
    [found] = train_step.gradients({"": batch}, 1)
    parameters = list(train_step.encoder.parameters())
    train_step.comm.all_reduce_gradients(parameters)
    losses = found.terms["contrastive"].item(), found.mlm_sum.item()
    return *losses, found.num_selected, [p.grad.clone() for p in parameters]


def test_released_scaling_is_a_number_that_one_worker_repeats():
    """The gradient is mlm + contrastive / 4 whatever the number of workers; null is off."""
    off, scaled = (gradients(*setup({"masking": HALF, "reference_rank_scaling": number})) for number in (None, 4))
    mlm = gradients(*setup({"masking": HALF, "reference_rank_scaling": 10**12}))
    assert scaled[0] == off[0]  # the loss that is shown is not divided
    assert deviation(scaled[3], [m + (g - m) / 4 for g, m in zip(off[3], mlm[3], strict=True)]) < 1e-10
    assert deviation(scaled[3], off[3]) > 1e-2


def test_the_padded_layouts_second_pass_replays_torchs_dropout():
    """Two passes equal one graph through all the pieces, each with its own seeded attention dropout."""
    encoder = {"dropout": 0.3, **PROJECTION, "layout": "padded"}
    train_step, batch = setup({"masking": HALF}, encoder=encoder, microbatch_tokens=40)
    pieces = batch.spans.microbatches(40)
    state, outputs = torch.random.get_rng_state(), []
    two_passes = gradients(train_step, batch)
    assert torch.equal(torch.random.get_rng_state(), state), "a step leaves the global generator alone"
    for number, piece in enumerate(pieces):
        torch.manual_seed(seeding.torch_seed(0, "dropout", 1, 0, number))
        outputs.append(train_step.encoder(piece))
    embeddings, mlm_sum = torch.cat([e for e, _ in outputs]), sum(loss for _, loss in outputs)
    objective = train_step.tasks[0].objective
    loss = tiny.contrastive(objective, objective.views(embeddings, batch))
    train_step.optimizer.zero_grad()
    (loss + mlm_sum / two_passes[2]).backward()
    one_graph = [torch.zeros_like(p) if p.grad is None else p.grad for p in train_step.encoder.parameters()]
    assert deviation(two_passes[:2], [loss, mlm_sum]) < 1e-12
    assert deviation(two_passes[3], one_graph) < 1e-10


def test_step_without_selected_tokens_has_no_mlm_loss():
    train_step, batch = setup({"masking": {"mlm_probability": 0.0}})
    metrics = train_step.step({"": batch}, 1)
    assert (metrics.terms["mlm"], metrics.num_selected) == (0.0, 0)
    assert metrics.loss == metrics.terms["contrastive"] > 0
    only_mlm, batch = setup({"terms": "mlm", "masking": {"mlm_probability": 0.0}})
    assert only_mlm.step({"": batch}, 1).loss == 0.0


def of_scd(comm=None, rows=slice(None), tokens=None, name="scd"):
    """SCD, whose projector and BatchNorm are behind the gather, and a batch of some of its 7 sentences."""
    [train_step] = train_steps_of(CASES[name], comm, tokens)
    table = SENTENCES.take(np.arange(7)[rows]).combine_chunks()
    return train_step, collator_of(train_step.tasks[0]).collate(table, np.ones(len(table), np.int64))


@pytest.mark.parametrize("tokens", [None, 40])
@pytest.mark.parametrize("name", ["queue", "mlm", "scd"])
def test_a_loss_that_is_not_finite_updates_nothing(name, tokens):
    """Neither parameters nor moments, the queue or the statistics of layers."""
    declutr = tiny.OBJECTIVES.get(name)
    train_step, batch = setup(declutr, microbatch_tokens=tokens) if declutr else of_scd(tokens=tokens)
    train_step.step({"": batch}, 1)
    with torch.no_grad():
        train_step.encoder.model.base_model.embeddings.LayerNorm.bias[0] = float("inf")
    before = copy.deepcopy(collect([train_step]))
    assert sorted(before) == ["encoder.safetensors", "objective.safetensors", "optimizer.safetensors"]
    assert bool(before["objective.safetensors"]) == (name != "mlm")
    with pytest.raises(NonFiniteLossError, match=all_of("step 2", "loss nan", "nothing was updated", "optim.lr")):
        train_step.step({"": batch}, 2)
    after = collect([train_step])
    assert all(torch.equal(after[file][key], value) for file, table in before.items() for key, value in table.items())


def test_metrics_count_what_was_computed():
    for layout in ("packed", "padded"):
        train_step, batch = setup({"masking": HALF}, encoder={"layout": layout}, microbatch_tokens=150)
        metrics = train_step.step({"": batch}, 1)
        assert (metrics.num_tokens, metrics.num_selected) == (batch.spans.num_tokens, len(batch.spans.labels))
        places = sum(len(p.lengths) * int(p.lengths.max()) for p in batch.spans.microbatches(150))
        expected = 0.0 if layout == "packed" else 1 - batch.spans.num_tokens / places
        assert metrics.padding_share == pytest.approx(expected, abs=1e-12)
    assert expected > 0.05


@pytest.mark.parametrize("tokens", [None, 40])
def test_autocast_changes_the_forward_alone(tokens):
    """bfloat16 products: gradients of float32 parameters within its precision of the float32 ones."""
    exact = gradients(*setup({"masking": HALF}, dtype=torch.float32))
    low = gradients(*setup({"masking": HALF}, dtype=torch.float32, autocast=torch.bfloat16, microbatch_tokens=tokens))
    assert low[2] == exact[2]
    assert 1e-5 < max(deviation(low[:2], exact[:2]), deviation(low[3], exact[3])) < 0.2
    flat, flat_low = (torch.cat([g.flatten() for g in results[3]]) for results in (exact, low))
    assert torch.cosine_similarity(flat, flat_low, dim=0) > 0.99


def test_fused_update_without_bias_correction_equals_the_plain_one():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]
    gradients = [[torch.randn(w.shape, generator=generator) for w in weights] for _ in range(4)]
    plain, fused = ([torch.nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    for parameters in (plain, fused):
        settings = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.1}
        optimizer = UncorrectedAdamW(parameters, **settings, fused=parameters is fused)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    assert deviation(plain, weights) > 0
    assert deviation(plain, fused) < 1e-6


NAMES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.25])
@pytest.mark.parametrize("steps", [1, 7, 50])
@pytest.mark.parametrize("schedule", NAMES)
def test_rates_are_those_of_transformers(schedule, steps, warmup):
    """The rate of each update, of which the first is that of the scheduler before its first step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-5)
    config = OptimConfig(lr=3e-5, schedule=schedule, warmup_ratio=warmup)
    warmup_steps = -(-steps * round(100 * warmup) // 100)  # rounded up, as TrainingArguments does
    scheduler = get_scheduler(NAMES[schedule], optimizer, warmup_steps, steps)
    for step in range(1, steps + 1):
        assert learning_rate(config, step, steps) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12, abs=1e-20)
        optimizer.step()
        scheduler.step()


def test_without_a_limit_gradients_are_not_scaled():
    norms, weights = [], []
    for limit in (None, 1e9, 1e-3):
        train_step, batch = setup({"masking": HALF}, optim=OptimConfig(lr=1e-2, max_grad_norm=limit))
        norms.append(train_step.step({"": batch}, 1).grad_norm)
        weights.append(torch.cat([p.flatten() for p in train_step.encoder.parameters()]))
    assert norms[0] == norms[1] == norms[2] > 1e-3
    assert [torch.equal(weights[0], other) for other in weights[1:]] == [True, False]


def test_weights_of_normalisation_layers_of_any_kind_do_not_decay():
    norms = torch.nn.RMSNorm(3), torch.nn.LayerNorm(3), torch.nn.BatchNorm1d(3), torch.nn.GroupNorm(1, 3)
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), *norms)
    decay, no_decay = parameter_groups(module, 0.1)
    assert ([id(p) for p in decay["params"]], len(no_decay["params"])) == ([id(module[0].weight)], 8)
    module[0].weight.requires_grad_(False)
    assert parameter_groups(module, 0.1)[0]["params"] == []


def test_layers_of_another_shape_are_refused(tmp_path):
    train_step, _ = of_scd()
    path = checkpoint.save(tmp_path, state_of(1), collect([train_step]))
    train_step.tasks[0].objective.projector[3] = nn.Linear(12, 9, bias=False).double()
    with pytest.raises(CheckpointError, match=all_of("objective.safetensors", "not fit")):
        load(path, [train_step])


WRONG_TERMS = [
    (lambda _: {}, "returned {}; it must return a dict of one term or more"),
    (lambda views: views.sum(), "it must return a dict"),
    (lambda _: {"repulsion": 1.0}, "returned the term 'repulsion' as 1.0; it must be a scalar tensor"),
    (lambda views: {"repulsion": views.sum(dim=(1, 2))}, r"torch.float64 of shape \[7\]; it must be a scalar"),
    (lambda _: {"repulsion": torch.tensor(1)}, r"a torch.int64 of shape \[\]"),
    (lambda views: {"repulsion": views.detach().sum()}, "has no gradient .* do not detach them"),
    (lambda views: {"other": views.sum()}, r"\['other'\].* config\.metrics"),
    (lambda views: {"mlm": views.sum()}, "has the term 'mlm', which the trainer computes"),
]


@pytest.mark.parametrize("tokens", [None, 60])
@pytest.mark.parametrize(("terms", "message"), WRONG_TERMS)
def test_terms_that_cannot_be_trained_are_refused_and_one_of_one_entry_is_not(terms, message, tokens):
    name = "simcse with mlm" if "mlm" in message else "scd"
    train_step, batch = of_scd(tokens=tokens, name=name)
    objective = train_step.tasks[0].objective
    objective.loss = lambda gathered: terms(gathered.views)
    with pytest.raises(UsageError, match=message) as raised:
        train_step.step({"": batch}, 1)
    assert f"objective {name.split()[0]}: `loss` " in str(raised.value)
    objective.loss = lambda gathered: {objective.config.metrics[0]: gathered.views.square().sum().reshape(1)}
    assert train_step.step({"": batch}, 1).grad_norm > 0


def test_views_of_another_shape_are_refused():
    train_step, batch = of_scd()
    objective = train_step.tasks[0].objective
    for views, facts in (
        (lambda embeddings, _: embeddings, ("objective scd", "`views`", "[7, 2, D]")),
        (lambda embeddings, rows: Objective.views(objective, embeddings[1:], rows), ("7 rows", "2 views")),
        (lambda embeddings, rows: Objective.views(objective, embeddings.detach(), rows), ("`views`", "detach nothing")),
    ):
        objective.views = views
        with pytest.raises(ValueError, match=all_of(facts)):
            train_step.step({"": batch}, 1)


def test_facts_that_do_not_fit_the_rows_are_refused():
    train_step, batch = of_scd()
    for dtype, rows, message in ((torch.int64, 3, ("torch.int64", "[3]", "[7]")), (torch.bool, 7, ("torch.bool",))):
        with pytest.raises(UsageError, match=all_of("objective scd", "'label'", message)):
            train_step.step({"": replace(batch, facts={"label": torch.zeros(rows, dtype=dtype)})}, 1)


def refused_on_ranks(comm):
    """Facts of the second rank alone; then detached terms, while the second rank has no rows and so no gradient."""
    messages = []
    for rows in (slice(3 * comm.rank, 3 + 4 * comm.rank), slice(0, 0 if comm.rank else 7)):
        train_step, batch = of_scd(comm, rows)
        if not messages and comm.rank:
            batch = replace(batch, facts={"label": torch.arange(batch.num_rows)})
        train_step.tasks[0].objective.loss = lambda gathered: {"repulsion": gathered.views.detach().sum()}
        with pytest.raises(UsageError) as refused:
            train_step.step({"": batch}, 1)
        messages.append(str(refused.value))
    return messages


@pytest.mark.dist
def test_facts_of_one_worker_and_detached_terms_are_refused_on_all():
    (first, *detached), (second, *others) = run_group(2, refused_on_ranks)
    says(first, "collator", "worker 0", "none")
    says(second, "collator", "worker 1", "label")
    assert all("not detach" in message for message in detached + others)


def test_gradients_that_are_not_finite_are_not_verified(monkeypatch):
    gradients = {"loss": torch.zeros(1), "weight": torch.full((2,), float("nan")), "bias": torch.ones(2)}
    monkeypatch.setattr(verify, "_single", lambda *_: (gradients, 14))
    config = least_config()
    assert {row.within for row in verify.verify(config, 4, [])} == {False}


def test_gradients_are_verified_without_compressed_sums(tmp_path):
    """Their reducer would send buckets that no step has begun."""
    config = train_config(word_shards(tmp_path / "data"), tmp_path / "run", scaling={"reduce_dtype": "bf16"})
    (train_step,), _ = verify._prepare(config, 2, verify.Case("float32", 2, None), Communicator(0, 2))
    assert train_step.tasks[0].overlap is None


def test_a_step_that_ran_out_of_memory_counts_its_statistics_once():
    """Memory ran out in the second backward, after the loss and a part of the gradient; both are computed again."""
    statistics, weights = [], []
    for fails in (True, False):
        train_step, batch = of_scd(tokens=60)
        train_step = tiny.with_task(train_step, microbatch=Microbatch(60, automatic=True))
        if fails:
            tiny.run_out_of_memory(train_step.encoder, 1)
        train_step.step({"": batch}, 1)
        assert (train_step.tasks[0].microbatch.max_tokens < 60) == fails
        state = train_step.tasks[0].objective.state()
        statistics.append([value for name, value in state.items() if "running" in name])
        weights.append(list(train_step.encoder.parameters()))
    assert deviation(*statistics) < 1e-12
    assert deviation(*weights) < 1e-10


@pytest.mark.parametrize("tokens", [None, 60])
def test_gradients_are_announced_before_the_last_backward_and_no_earlier(tokens):
    """Then all but the last microbatch are in the gradient, and the last one's forward is done."""
    train_step, batch = of_scd(tokens=tokens)
    calls, task = [], train_step.tasks[0]

    class Announced(BucketedReducer):
        def arm(self):
            calls.append("announced")

    def called(*_):
        calls.append("forward" if torch.is_grad_enabled() else "without a graph")

    task.encoder.register_forward_pre_hook(called)
    pieces = task._pieces(batch)
    passes = GradCache(replace(task, overlap=Announced(list(task.encoder.parameters()))), 1, batch, pieces)
    passes.differentiate(passes.embed(), passes.count())
    assert (len(pieces) > 1, calls[-1]) == (tokens is not None, "announced")
    assert calls.count("forward") == len(pieces)
