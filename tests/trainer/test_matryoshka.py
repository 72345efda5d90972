"""Matryoshka sizes: losses and gradients are those of sentence-transformers, and of a plain writing; wrong sizes."""

import json

import numpy as np
import pytest
import tinyruns as runs
import torch
import torch.nn.functional as F
from messages import says
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss
from tiny import declutr
from tinyruns import problems
from torch import nn

from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import CutEncoder, sizes_of
from declutr.pipeline.shards.content import ENTAILMENT
from declutr.trainer.build import build_encoder, load_tokenizer
from declutr.trainer.objectives.base import Gathered
from declutr.trainer.objectives.config import MatryoshkaConfig, RunContext
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.simcse import Simcse
from declutr.trainer.objectives.supcon.config import SupconConfig
from declutr.trainer.objectives.supcon.objective import Supcon, supcon
from declutr.trainer.objectives.text_config import ScdConfig, SclConfig, SimcseConfig
from declutr.trainer.objectives.texts import Scd, Scl, contrast
from declutr.trainer.train import run_training

ROWS, SIZE = 9, 12
SIZES = {"sizes": [3, "all", 8], "weights": [0.5, 1.0, 2.0]}
CUTS = ((3, 0.5), (12, 1.0), (8, 2.0))


class Columns(nn.Module):
    """A model in the interface of sentence-transformers whose texts are embeddings."""

    def get_embedding_dimension(self):
        return SIZE

    def forward(self, features):
        return {"sentence_embedding": features["embedding"]}


def theirs(columns, **options):
    """sentence-transformers' MatryoshkaLoss of columns of embeddings, at the temperature 0.2."""
    model = Columns()
    loss = MultipleNegativesRankingLoss(model, scale=5.0, **options)
    sizes = [size for size, _ in CUTS]
    matryoshka = MatryoshkaLoss(model, loss, sizes, [weight for _, weight in CUTS])
    return matryoshka([{"embedding": column} for column in columns], None)


def views_of(count):
    views = torch.randn(ROWS, count, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return views.requires_grad_()


def made(kind, config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return kind(config, RunContext(batch_documents=ROWS), SIZE).double().train()


def check(objective, expected_of, count=2, **facts):
    """Values and gradients of an objective's sum of terms, and of a function of the views."""
    views, own = views_of(count), views_of(count)
    terms = objective.terms(Gathered(views, facts))
    found, expected = sum(terms.values()), expected_of(own)
    found.backward()
    gradients = [p.grad.clone() for p in objective.parameters() if p.grad is not None]
    objective.zero_grad()
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-10)
    torch.testing.assert_close(views.grad, own.grad, rtol=0, atol=1e-10)
    others = [p.grad for p in objective.parameters() if p.grad is not None]
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_declutr_loss_with_sizes_is_that_of_sentence_transformers():
    """NT-Xent is the mean of two of its losses, in which anchors and positives also compete with their own kind."""
    objective = declutr(DeclutrConfig(terms="contrastive", loss={"temperature": 0.2}, matryoshka=SIZES), size=SIZE)
    both = {"directions": ("query_to_doc", "query_to_query")}
    check(objective, lambda views: (theirs(views.unbind(1), **both) + theirs(views.flip(1).unbind(1), **both)) / 2)


@pytest.mark.parametrize("supervised", [False, True])
def test_simcse_loss_with_sizes_is_that_of_sentence_transformers(supervised):
    """With hard negatives, behind the exported head; a head that is dropped reads the cut embedding."""
    config = SimcseConfig(supervised=supervised, head=supervised, temperature=0.2, matryoshka=SIZES)
    objective = made(Simcse, config)
    check(objective, lambda views: theirs(objective.head(views).unbind(1)), count=2 + supervised)


def supcon_sizes():
    labels = torch.arange(ROWS) % 4
    objective = made(Supcon, SupconConfig(temperature=0.2, base_temperature=0.2, head=False, matryoshka=SIZES))
    return objective, lambda views, _: supcon(torch.cat(views.unbind(1)), labels.repeat(2), 0.2), {"label": labels}


def scl_sizes():
    """Contrast and classification of each size."""
    config, keys = SclConfig(contrastive_weight=0.4, matryoshka=SIZES), torch.arange(ROWS)
    objective = made(Scl, config)
    facts = {"label": keys % 2 * (2 - ENTAILMENT) + ENTAILMENT, "premise": keys // 3, "hypothesis": keys}
    parts = objective.classifier[0].weight.unflatten(1, (3, SIZE))

    def loss(views, size):
        u, v = views.unbind(1)
        hidden = sum(one @ parts[:, k, :size].T for k, one in enumerate((u, v, (u - v).abs())))
        logits = objective.classifier[1](hidden + objective.classifier[0].bias)
        return 0.6 * F.cross_entropy(logits, facts["label"]) + 0.4 * contrast(Gathered(views, facts), config)

    return objective, loss, facts


def scd_sizes():
    objective = made(Scd, ScdConfig(projector=[7, 6], matryoshka=SIZES))
    return objective, lambda views, size: sum(objective.loss(Gathered(F.pad(views, (0, SIZE - size)))).values()), {}


def queue_sizes():
    """A queued embedding counts with the same numbers as the others."""
    config = DeclutrConfig(terms="contrastive", queue_size=6, loss={"temperature": 0.2}, matryoshka=SIZES)
    objective, plain = declutr(config, size=SIZE), declutr(config, size=SIZE)
    objective.queue = queue = torch.randn(6, SIZE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def loss(views, size):
        plain.queue = queue[:, :size]
        return plain.loss(Gathered(views))["contrastive"]

    return objective, loss, {}


def dropped_head_sizes():
    """A head that is dropped follows the cut."""
    objective = made(Simcse, SimcseConfig(temperature=0.2, matryoshka=SIZES))
    linear = objective.head[0]

    def loss(views, size):
        first, second = (views @ linear.weight[:, :size].T + linear.bias).tanh().unbind(1)
        return F.cross_entropy(F.cosine_similarity(first[:, None], second[None], dim=-1) / 0.2, torch.arange(ROWS))

    return objective, loss, {}


@pytest.mark.parametrize("sizes_of_one", [supcon_sizes, scl_sizes, scd_sizes, queue_sizes, dropped_head_sizes])
def test_loss_with_sizes_is_the_weighted_sum_over_sizes(sizes_of_one):
    objective, loss, facts = sizes_of_one()
    check(objective, lambda v: sum(weight * loss(v[..., :size], size) for size, weight in CUTS), **facts)


@pytest.mark.parametrize("sizes", [{"sizes": ["all"]}, {"sizes": [4, "all"], "weights": [0, 1]}])
def test_the_whole_embedding_alone_changes_no_bit(sizes):
    views = views_of(2)
    plain = declutr(DeclutrConfig(terms="contrastive"), size=SIZE).terms(Gathered(views))["contrastive"]
    config = DeclutrConfig(terms="contrastive", matryoshka=sizes)
    assert torch.equal(declutr(config, size=SIZE).terms(Gathered(views))["contrastive"], plain)


@pytest.mark.parametrize(
    ("sizes", "facts"),
    [
        ([32, 128, 999, "all"], ("999", "128 numbers", "remove 999")),
        ([128, "all"], ("same size", "remove")),
        ([32, 64], ("[32, 64]", "add all")),
    ],
)
def test_matryoshka_that_does_not_fit_the_embedding_names_the_remedy(sizes, facts):
    says(MatryoshkaConfig(sizes=sizes).problem(128), *facts)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return runs.word_shards(tmp_path_factory.mktemp("data") / "out", rows=40, held_out=range(1, 40, 2))


def config_of(data, run, **changes):
    given = {"objective": {"matryoshka": {"sizes": [8, "all"]}}, "scaling": {"num_workers": 0}, "steps": 2}
    return runs.train_config(data, run, **given | {"validation": {"every_steps": 1}} | changes)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"objective": {"matryoshka": {"sizes": [8, 99, "all"]}}}, ("objective.matryoshka.sizes", "99", "32 numbers")),
        ({"encoder": {"projection": {"kind": "linear"}}}, ("encoder.projection.kind = linear", "set it to none")),
    ],
)
def test_sizes_that_do_not_fit_the_encoder_are_refused_before_a_run(data, tmp_path, changes, facts):
    (problem,) = problems(config_of(data, tmp_path / "run", **changes))
    says(problem, *facts)


@pytest.mark.slow
def test_run_with_sizes_scores_and_declares_them(data, tmp_path):
    """Validation, `config.json`, the model card, and the first numbers in sentence-transformers."""
    run_training(config_of(data, tmp_path / "run"))
    whole = {"recall_at_1", "mrr", "distant_recall_at_1", "distant_mrr", "alignment", "uniformity", "effective_rank"}
    line = runs.steps_of(tmp_path / "run", "validation")[2]
    assert whole | {f"{name}_8" for name in whole} <= set(line)
    assert line["uniformity_8"] != line["uniformity"]
    assert not any(name.endswith("_32") for name in line)
    export = tmp_path / "run" / "export"
    assert json.loads((export / "config.json").read_text())["matryoshka_dimensions"] == [8, 32]
    says((export / "README.md").read_text(), "Sizes: 8/all")
    encoder = load_encoder(str(export), device="cpu")
    assert sizes_of(encoder, None) == sizes_of(load_encoder(str(tmp_path / "run"), device="cpu"), None) == (8,)
    cut = SentenceTransformer(str(export), device="cpu", truncate_dim=8).encode(["word1 word2"])
    np.testing.assert_allclose(cut, CutEncoder(encoder, 8).encode(["word1 word2"]), atol=1e-5)


def test_sizes_of_an_earlier_training_are_not_declared(data, tmp_path):
    """What trains on without sizes does not keep the promise."""
    earlier = {"from_config": runs.FROM_CONFIG | {"matryoshka_dimensions": [8]}}
    config = config_of(data, tmp_path / "run", encoder=earlier, objective={})
    tokenizer, _ = load_tokenizer(data)
    assert not hasattr(build_encoder(config, tokenizer).model.config, "matryoshka_dimensions")
