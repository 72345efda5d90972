"""Layers of an objective behind the gather: saved and put back, kept by a step that fails; what a loss may return.

The objective is DeCLUTR with a projector and BatchNorm in the loss, as SCD has them. Their gradients and statistics on
any number of workers are SCD's in test_text_objectives.py.
"""

from dataclasses import replace

import pytest
import torch
from groups import run_group
from measures import deviation
from messages import all_of, says
from states import state_of
from tiny import documents, rank_batch, run_out_of_memory, tiny_collator, tiny_encoder, tiny_train_step, with_task
from torch import nn

from declutr.common.errors import CheckpointError, UsageError
from declutr.trainer import verify
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.weights import collect, load
from declutr.trainer.config import TrainConfig
from declutr.trainer.data.plan import Plan
from declutr.trainer.objectives.base import Gathered, Objective
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.declutr.objective import Declutr, ntxent
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.parallel.reducers import BucketedReducer
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.gradcache import GradCache, Microbatch
from declutr.trainer.step.step import NonFiniteLossError

LENGTHS = [48, 70, 49, 131, 60]
BOTH = DeclutrConfig(masking={"mlm_probability": 0.5})
DROPOUT = {"dropout": 0.2, "attention_dropout": 0.2}


class Projected(Declutr):
    """DeCLUTR over projections."""

    state, restore = Objective.state, Objective.restore

    def __init__(self, config, run, embedding_size):
        super().__init__(config, run, embedding_size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            layers = nn.Linear(embedding_size, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8)
        self.projector = nn.Sequential(*layers)

    def loss(self, batch: Gathered):
        projected = self.projector(torch.cat([batch.views[:, 0], batch.views[:, 1]]))
        return {"contrastive": ntxent(projected, 0.3)}


def setup(comm, tokens=None, start=0, end=None):
    encoder = tiny_encoder(**DROPOUT)
    loss = Projected(BOTH, RunContext(), encoder.embedding_size).double()
    given = {"comm": comm, "microbatch_tokens": tokens, "optim": OptimConfig(lr=1e-2), "loss": loss}
    return tiny_train_step(encoder, BOTH, **given), rank_batch(tiny_collator(BOTH), documents(LENGTHS, 12), start, end)


def test_a_checkpoint_holds_the_layers_their_moments_and_statistics(tmp_path):
    train_step, batch = setup(Communicator())
    train_step.step({"": batch}, 1)
    path = checkpoint.save(tmp_path, state_of(1), collect([train_step]))
    after = train_step.step({"": batch}, 2)
    again, batch = setup(Communicator())
    load(path, [again])
    assert again.step({"": batch}, 2) == after
    states = [one.tasks[0].objective.state().values() for one in (again, train_step)]
    for found, expected in zip(*states, strict=True):
        assert torch.equal(found, expected)


def test_layers_of_another_shape_are_refused(tmp_path):
    train_step, _ = setup(Communicator())
    path = checkpoint.save(tmp_path, state_of(1), collect([train_step]))
    train_step.tasks[0].objective.projector[3] = nn.Linear(12, 9).double()
    with pytest.raises(CheckpointError, match=all_of("objective.safetensors", "not fit")):
        load(path, [train_step])


def test_a_skipped_step_leaves_the_statistics_alone():
    train_step, batch = setup(Communicator())
    train_step.step({"": batch}, 1)
    before = {name: value.clone() for name, value in train_step.tasks[0].objective.state().items()}
    with torch.no_grad():
        train_step.encoder.model.base_model.embeddings.LayerNorm.bias[0] = float("nan")
    with pytest.raises(NonFiniteLossError, match="nothing was updated"):
        train_step.step({"": batch}, 2)
    assert all(torch.equal(value, before[name]) for name, value in train_step.tasks[0].objective.state().items())


WRONG_TERMS = [
    (lambda _: {}, "returned {}; it must return a dict of one term or more"),
    (lambda views: views.sum(), "it must return a dict"),
    (lambda _: {"contrastive": 1.0}, "returned the term 'contrastive' as 1.0; it must be a scalar tensor"),
    (lambda views: {"contrastive": views.sum(dim=(1, 2))}, r"torch.float64 of shape \[10\]; it must be a scalar"),
    (lambda _: {"contrastive": torch.tensor(1)}, r"a torch.int64 of shape \[\]"),
    (lambda views: {"contrastive": views.detach().sum()}, "has no gradient .* do not detach them"),
    (lambda views: {"mlm": views.sum()}, "has the term 'mlm', which the trainer computes"),
    (lambda views: {"other": views.sum()}, r"\['other'\].* config\.metrics"),
]


@pytest.mark.parametrize("tokens", [None, 60])
@pytest.mark.parametrize(("terms", "said"), WRONG_TERMS)
def test_terms_that_cannot_be_trained_are_refused(terms, said, tokens):
    train_step, batch = setup(Communicator(), tokens)
    train_step.tasks[0].objective.loss = lambda gathered: terms(gathered.views)
    with pytest.raises(UsageError, match=said) as raised:
        train_step.step({"": batch}, 1)
    assert "objective declutr: `loss` " in str(raised.value)


def detached_on_ranks(comm):
    """The second of two ranks has no rows, so its part of the views never has a gradient."""
    train_step, batch = setup(comm, start=0, end=0 if comm.rank else len(LENGTHS))
    train_step.tasks[0].objective.loss = lambda gathered: {"contrastive": gathered.views.detach().sum()}
    with pytest.raises(UsageError) as refused:
        train_step.step({"": batch}, 1)
    return str(refused.value)


@pytest.mark.dist
def test_a_rank_without_rows_refuses_detached_terms_as_the_others_do():
    assert all("not detach" in said for said in run_group(2, detached_on_ranks))


def test_a_term_of_one_entry_is_a_scalar():
    train_step, batch = setup(Communicator())
    train_step.tasks[0].objective.loss = lambda gathered: {"contrastive": gathered.views.square().sum().reshape(1)}
    assert train_step.step({"": batch}, 1).grad_norm > 0


def test_views_of_another_shape_are_refused():
    train_step, batch = setup(Communicator())
    rows = batch.num_rows
    train_step.tasks[0].objective.views = lambda embeddings, _: embeddings
    with pytest.raises(ValueError, match=all_of("objective declutr", "`views`", f"[{rows}, 2, D]")):
        train_step.step({"": batch}, 1)
    objective = train_step.tasks[0].objective
    objective.views = lambda embeddings, given: Objective.views(objective, embeddings, given)
    with pytest.raises(ValueError, match=all_of(f"{rows} rows", "2 views")):
        train_step.step({"": batch}, 1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (torch.zeros(3, dtype=torch.int64), ("'label'", "torch.int64", "[3]", "[10]")),
        (torch.zeros(10, dtype=torch.bool), ("'label'", "torch.bool")),
    ],
)
def test_facts_that_do_not_fit_the_rows_are_refused(values, said):
    train_step, batch = setup(Communicator())
    with pytest.raises(UsageError, match=all_of("objective declutr", said)):
        train_step.step({"": replace(batch, facts={"label": values})}, 1)


def facts_on_one_rank(comm):
    start, end = Plan(0, len(LENGTHS), len(LENGTHS)).slice(comm.rank, comm.size)
    train_step, batch = setup(comm, start=start, end=end)
    facts = {"label": torch.arange(batch.num_rows)} if comm.rank else {}
    with pytest.raises(UsageError) as refused:
        train_step.step({"": replace(batch, facts=facts)}, 1)
    return str(refused.value)


@pytest.mark.dist
def test_facts_of_one_worker_only_are_refused_on_all():
    first, second = run_group(2, facts_on_one_rank)
    says(first, "collator", "worker 0", "none")
    says(second, "collator", "worker 1", "label")


def test_gradients_that_are_not_finite_are_not_verified(monkeypatch):
    gradients = {"loss": torch.zeros(1), "weight": torch.full((2,), float("nan")), "bias": torch.ones(2)}
    monkeypatch.setattr(verify, "_single", lambda *_: (gradients, 14))
    config = TrainConfig(run="r", data="d", encoder={"from_config": {"model_type": "roberta"}})
    found = list(verify.verify(config, 4, []))
    assert found
    assert not any(row.within for row in found)


def test_a_step_that_ran_out_of_memory_counts_its_statistics_once():
    """Memory ran out in the second backward, after the loss and a part of the gradient; both are computed again."""
    found, weights = [], []
    for fails in (True, False):
        train_step, batch = setup(Communicator(), 60)
        train_step = with_task(train_step, microbatch=Microbatch(60, automatic=True))
        if fails:
            run_out_of_memory(train_step.encoder, 1)
        train_step.step({"": batch}, 1)
        assert (train_step.tasks[0].microbatch.max_tokens < 60) == fails
        found.append(train_step.tasks[0].objective.state())
        weights.append([parameter.detach().clone() for parameter in train_step.encoder.parameters()])
    statistics = [[value for name, value in state.items() if "running" in name] for state in found]
    assert deviation(*statistics) < 1e-12
    assert deviation(*weights) < 1e-10


@pytest.mark.parametrize("tokens", [None, 60])
def test_gradients_are_announced_before_the_last_backward_and_no_earlier(tokens):
    """Then all but the last microbatch are in the gradient, and the last one's forward is done."""
    train_step, batch = setup(Communicator(), tokens)
    calls, forward = [], train_step.encoder.forward

    def counted(*given):
        calls.append("forward" if torch.is_grad_enabled() else "without a graph")
        return forward(*given)

    train_step.encoder.forward = counted

    class Announced(BucketedReducer):
        def arm(self):
            calls.append("announced")

    task = train_step.tasks[0]
    pieces = task._pieces(batch)
    announced = replace(task, overlap=Announced(task.comm, list(task.encoder.parameters())))
    passes = GradCache(announced, 1, batch, pieces)
    passes.differentiate(passes.embed(), passes.count())
    assert (len(pieces) > 1) == (tokens is not None)
    assert calls[-1] == "announced"
    assert calls.count("forward") == len(pieces)
