"""SimCSE, SCD and SCL: the order of a batch, keys, draws and terms; Matryoshka sizes of every objective."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import tinyruns as runs
import torch
import torch.nn.functional as F
from cases import CASES, PAIRS, TEXTS, batch_of, train_steps_of
from messages import says
from rows import sentences, text_rows
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss
from tiny import VOCABULARY, declutr, tiny_encoder
from tinyruns import problems
from torch import nn

from declutr.common.errors import UsageError
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import CutEncoder, sizes_of
from declutr.pipeline.shards.content import ENTAILMENT
from declutr.trainer.build import build_encoder, load_tokenizer
from declutr.trainer.objectives.base import Gathered, implementation_of
from declutr.trainer.objectives.config import MatryoshkaConfig, RunContext
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.supcon.config import SupconConfig
from declutr.trainer.objectives.supcon.objective import supcon
from declutr.trainer.objectives.text_config import ScdConfig, SclConfig, SimcseConfig
from declutr.trainer.objectives.texts import contrast
from declutr.trainer.train import run_training


def build(config, size=16, **context):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return implementation_of(config)(config, RunContext(**context), size).double().train()


def objective_of(name, **changes):
    return build(TEXTS[name].config.model_copy(update=changes))


def setup(name):
    train_steps = train_steps_of(CASES[name])
    return train_steps[0], batch_of(CASES[name], train_steps)[""]


def collated(name, rows=None, epoch=0, **changes):
    rows = TEXTS[name].rows if rows is None else rows
    return objective_of(name, **changes).collator(VOCABULARY, 30).collate(rows, np.full(len(rows), epoch))


@pytest.mark.parametrize("name", TEXTS)
def test_no_two_spans_share_a_dropout_key_and_a_worker_without_rows_takes_part(name):
    """Each epoch drops other features."""
    keys = [collated(name, epoch=epoch).spans.keys for epoch in (0, 1, 0)]
    assert len(keys[0].unique()) == len(keys[0])
    assert (keys[0] != keys[1]).all()
    assert torch.equal(keys[0], keys[2])
    batch = collated(name, TEXTS[name].rows.slice(0, 0))
    assert batch.spans.num_spans == batch.num_rows == 0
    assert list(batch.facts) == list(collated(name).facts)


def test_texts_are_cut_with_their_specials():
    """32 tokens, as the papers count them."""
    rows = sentences([40, 30, 31, 5])
    spans = collated("simcse", rows).spans
    assert spans.lengths.tolist() == [32, 32, 32, 32, 32, 32, 7, 7]
    assert spans.input_ids[:32].tolist() == [0, *rows["tokens"][0].as_py()[:30], 2]


def test_hypotheses_change_with_the_epoch_and_not_with_the_batch():
    rows = text_rows([[(3, -1), *[(2, 0)] * 6, *[(2, 2)] * 5]])
    drawn = [collated("simcse supervised", rows, epoch).spans.input_ids.tolist() for epoch in range(40)]
    assert drawn == [collated("simcse supervised", rows, epoch).spans.input_ids.tolist() for epoch in range(40)]
    assert (len({tuple(ids[5:9]) for ids in drawn}), len({tuple(ids[9:]) for ids in drawn})) == (6, 5)


def copies(name, **changes):
    """Texts of the views, then their masked copies before and after the masks are undone."""
    batch = collated(name, **changes)
    spans, views = batch.spans, batch.views.numel()
    assert spans.selected.min() >= spans.lengths[:views].sum(), "a view is masked"
    assert batch.views.max() == views - 1, "a copy is a view"
    restored = spans.input_ids.clone()
    restored[spans.selected] = spans.labels
    texts, masked = (ids.tensor_split(spans.lengths.cumsum(0)[:-1]) for ids in (restored, spans.input_ids))
    return ([text.tolist() for text in part] for part in (texts[:views], texts[views:], masked[views:]))


def test_masked_copies_are_texts_of_the_views_and_no_views():
    """One copy a sentence; or, as released, one of every view, each with its own mask."""
    views, texts, first = copies("simcse with mlm")
    assert texts == views[::2]
    views, texts, masked = copies("simcse with mlm", mlm_copies="all")
    assert (texts, masked[::2]) == (views, first)
    assert masked[::2] != masked[1::2]
    views, texts, _ = copies("simcse with mlm on all copies")
    assert texts == views


def test_the_projector_starts_as_released():
    """Normal weights of 0.02 and biases of 0, as BERT's; without the setting, those of torch."""
    plain, released = (objective_of("scd", projector=[400, 300], initializer_range=std) for std in (None, 0.02))
    layers = [pair for pair in zip(released.projector, plain.projector, strict=True) if hasattr(pair[0], "in_features")]
    assert layers
    for layer, other in layers:
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert (layer.weight.abs() > 0.04).float().mean().item() == pytest.approx(0.0455, abs=0.006)  # normal
        assert layer.bias is None or not layer.bias.any()
        assert other.weight.abs().max() <= layer.in_features**-0.5


def test_the_weight_of_mlm_scales_its_part_of_the_gradient():
    """The gradient is that of contrastive + weight * mlm, and the reported mlm has no weight."""
    losses, gradients = [], []
    for weight in (0.1, 0.5, 0.3):
        train_step, batch = setup("simcse with mlm")
        objective = train_step.tasks[0].objective
        objective.config = objective.config.model_copy(update={"mlm_loss_weight": weight})
        train_step.gradients({"": batch}, 1)
        reached = [p.grad.flatten() for p in train_step.encoder.parameters() if p.grad is not None]
        gradients.append(torch.cat(reached))
        metrics = train_step.step({"": batch}, 1)
        losses.append(metrics.terms["mlm"])
        assert metrics.loss == pytest.approx(metrics.terms["contrastive"] + weight * losses[-1], rel=1e-12)
    assert losses[0] == losses[1]
    torch.testing.assert_close(gradients[2], (gradients[0] + gradients[1]) / 2)


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
    assert set(objective_of("scl", contrastive_weight=0.0).loss(alone)) == {"classification"}


def test_equal_premises_of_two_rows_are_one_premise():
    """As in the released code, which compares their tokens: files are grouped one by one, so a premise may recur."""
    rows = pa.concat_tables([PAIRS.slice(0, 1), PAIRS.slice(0, 2)])
    ids = pa.array([b"another row's id", *rows["id"][1:].to_pylist()], pa.binary(16))
    batch = collated("scl", rows.set_column(0, "id", ids).combine_chunks())
    premises = batch.facts["premise"].tolist()
    assert premises[:3] == premises[3:6] != premises[6:9]
    assert len(batch.facts["hypothesis"].unique()) == len(premises)


def test_heads_are_exported_as_released():
    (dense,) = objective_of("simcse supervised").exported()
    assert isinstance(dense[1], torch.nn.Tanh)
    assert objective_of("simcse supervised", head=False).exported() == []
    assert all(objective_of(name).exported() == [] for name in ("simcse", "scd", "scl"))


def test_scd_drops_each_view_at_its_own_rates():
    """The first rate of a pair is that of the first view; hidden states and attention weights have separate pairs."""
    batch = collated("scd", dropout_rates=(0.1, 0.2), attention_dropout_rates=(0.3, 0.4))
    assert batch.spans.rates.tolist() == [[0.1, 0.3], [0.2, 0.4]] * 7
    spans = collated("scd", dropout_rates=(0.0, 0.5), attention_dropout_rates=(0.0, 0.0)).spans
    encoder = tiny_encoder(dropout=0.2, attention_dropout=0.2)
    with torch.no_grad():
        views, whole_views = encoder(spans)[0].view(7, 2, -1), encoder.eval()(spans)[0].view(7, 2, -1)
    torch.testing.assert_close(views[:, 0], whole_views[:, 0])
    assert not torch.isclose(views[:, 1], whole_views[:, 1]).all(1).any()


def test_equal_views_drop_the_same_features_and_views_with_one_key_are_refused_otherwise():
    equal, other = (collated("simcse", equal_views=value).spans.keys.view(-1, 2) for value in (True, False))
    assert equal[:, 0].equal(equal[:, 1])
    assert equal[:, 0].equal(other[:, 0])
    assert not (other[:, 0] == other[:, 1]).any()
    assert [objective_of("simcse", equal_views=value).config.needs_dropout for value in (True, False)] == [False, True]
    for name in ("simcse", "scd"):  # equal keys with two rates would nest one view's mask in the other's
        train_step, batch = setup(name)
        first = batch.spans.keys[torch.arange(len(batch.spans.keys)) // 2 * 2]
        with pytest.raises(UsageError, match="same dropout key"):
            train_step.step({"": replace(batch, spans=replace(batch.spans, keys=first))}, 1)


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
    loss = MatryoshkaLoss(model, MultipleNegativesRankingLoss(model, scale=5.0, **options), *zip(*CUTS, strict=True))
    return loss([{"embedding": column} for column in columns], None)


def views_of(count):
    views = torch.randn(ROWS, count, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return views.requires_grad_()


def with_sizes(kind, **settings):
    return build(kind(**settings, matryoshka=SIZES), SIZE, batch_documents=ROWS)


def check(objective, loss, count=2, **facts):
    """Values and gradients of an objective's sum of terms, and of a function of the views."""
    results = []
    for function in (lambda views: sum(objective.terms(Gathered(views, facts)).values()), loss):
        objective.zero_grad()
        views = views_of(count)
        value = function(views)
        value.backward()
        gradients = [p.grad.clone() for p in objective.parameters() if p.grad is not None]
        results.append((value.item(), [views.grad, *gradients]))
    (found, tensors), (expected, others) = results
    assert found == pytest.approx(expected, rel=1e-10)
    for tensor, other in zip(tensors, others, strict=True):
        torch.testing.assert_close(tensor, other, rtol=0, atol=1e-10)


def test_declutr_loss_with_sizes_is_that_of_sentence_transformers():
    """NT-Xent is the mean of two of its losses, in which anchors and positives also compete with their own kind."""
    objective = declutr(DeclutrConfig(terms="contrastive", loss={"temperature": 0.2}, matryoshka=SIZES), size=SIZE)
    both = {"directions": ("query_to_doc", "query_to_query")}
    check(objective, lambda views: (theirs(views.unbind(1), **both) + theirs(views.flip(1).unbind(1), **both)) / 2)


@pytest.mark.parametrize("supervised", [False, True])
def test_simcse_loss_with_sizes_is_that_of_sentence_transformers(supervised):
    """With hard negatives, behind the exported head; a head that is dropped reads the cut embedding."""
    objective = with_sizes(SimcseConfig, supervised=supervised, head=supervised, temperature=0.2)
    check(objective, lambda views: theirs(objective.head(views).unbind(1)), count=2 + supervised)


def supcon_sizes():
    labels = torch.arange(ROWS) % 4
    objective = with_sizes(SupconConfig, temperature=0.2, base_temperature=0.2, head=False)
    return objective, lambda views, _: supcon(torch.cat(views.unbind(1)), labels.repeat(2), 0.2), {"label": labels}


def scl_sizes():
    objective, keys = with_sizes(SclConfig, contrastive_weight=0.4), torch.arange(ROWS)
    facts = {"label": keys % 2 * (2 - ENTAILMENT) + ENTAILMENT, "premise": keys // 3, "hypothesis": keys}
    parts = objective.classifier[0].weight.unflatten(1, (3, SIZE))

    def loss(views, size):
        u, v = views.unbind(1)
        hidden = sum(one @ parts[:, k, :size].T for k, one in enumerate((u, v, (u - v).abs())))
        logits = objective.classifier[1](hidden + objective.classifier[0].bias)
        return 0.6 * F.cross_entropy(logits, facts["label"]) + 0.4 * contrast(Gathered(views, facts), objective.config)

    return objective, loss, facts


def scd_sizes():
    objective = with_sizes(ScdConfig, projector=[7, 6])
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
    objective = with_sizes(SimcseConfig, temperature=0.2)
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


def test_matryoshka_that_does_not_fit_the_embedding_names_the_remedy():
    for sizes, facts in (
        ([32, 128, 999, "all"], ("999", "128 numbers", "remove 999")),
        ([128, "all"], ("same size", "remove")),
        ([32, 64], ("[32, 64]", "add all")),
    ):
        says(MatryoshkaConfig(sizes=sizes).problem(128), *facts)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return runs.word_shards(tmp_path_factory.mktemp("data") / "out", rows=40, held_out=range(1, 40, 2))


def config_of(data, run, **changes):
    settings = {"objective": {"matryoshka": {"sizes": [8, "all"]}}, "scaling": {"num_workers": 0}, "steps": 2}
    return runs.train_config(data, run, **settings | {"validation": {"every_steps": 1}} | changes)


def test_sizes_that_do_not_fit_the_encoder_are_refused_before_a_run_and_earlier_ones_not_declared(data, tmp_path):
    """What trains on without sizes does not keep the promise of an earlier training."""
    for changes, facts in (
        ({"objective": {"matryoshka": {"sizes": [8, 99, "all"]}}}, ("objective.matryoshka.sizes", "99", "32 numbers")),
        ({"encoder": {"projection": {"kind": "linear"}}}, ("encoder.projection.kind = linear", "set it to none")),
    ):
        (problem,) = problems(config_of(data, tmp_path / "run", **changes))
        says(problem, *facts)
    earlier = {"from_config": runs.FROM_CONFIG | {"matryoshka_dimensions": [8]}}
    config = config_of(data, tmp_path / "run", encoder=earlier, objective={})
    tokenizer, _ = load_tokenizer(data)
    assert not hasattr(build_encoder(config, tokenizer).model.config, "matryoshka_dimensions")


@pytest.mark.slow
def test_run_with_sizes_scores_and_declares_them(data, tmp_path):
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
