"""The closed form; how often the verdict says "better": of nothing, planted gains, planted faults of its own path.

Documents and encoders are drawn: a passage's embedding is its document's topic and noise. Without a gain, start and
candidates are exchangeable: the noise of each has the same distribution, and half of it is common.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from madeup import config_of, shards
from messages import all_of
from sentence_transformers import SentenceTransformer
from tiny import VOCABULARY, documents
from torch import nn
from transformers import AutoTokenizer

from declutr.adaptation import scores
from declutr.adaptation.candidates import FOLDS, ORDER, WithinSums, passage_ids, whitening, within_sums, write_whitened
from declutr.adaptation.config import LENGTHS
from declutr.adaptation.job import _Adaptation
from declutr.adaptation.paragraphs import Paragraphs
from declutr.adaptation.passages import Passages
from declutr.adaptation.scores import DISTANT, MIN_FOLDED, SENTENCES, STATISTICS, choose, judge, merged
from declutr.common import bootstrap
from declutr.common.errors import UsageError
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import unit_rows
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.build import build_encoder
from declutr.trainer.driver.export import write_encoder
from declutr.trainer.model.behind import Dense, Normalize, write_steps
from declutr.trainer.model.language_model import vocabulary_of

SIZE, NOISE = 12, 0.75


def passages_of(documents, each):
    owners = np.repeat(np.arange(documents), each)
    starts = np.tile(LENGTHS.far * np.arange(each), documents)
    return Passages([], [], owners, starts, starts + LENGTHS.passage, [], np.empty(0, np.int64), documents)


def measured(rng, measure, documents, gain, each):
    """Values of the start, and of each candidate, on documents of their own, which have 1 to `each` queries."""
    passages = passages_of(documents, each)
    owners = np.sort(rng.permutation(passages.owners)[: 3 * len(passages.owners) // 4])
    paragraphs = Paragraphs(["?"] * len(owners), [""] * len(owners), owners, documents)
    topics = np.repeat(rng.normal(size=(documents, SIZE)), each, axis=0)
    common = rng.normal(size=topics.shape)
    own, noises, values = rng.normal(size=(len(owners), SIZE)), rng.normal(size=(2, len(owners), SIZE)), []
    for noise in [NOISE, *[NOISE * (1 - gain)] * len(ORDER)]:

        def embedded(topics, common, noise=noise):
            drawn = (common + rng.normal(size=topics.shape)) / np.sqrt(2)
            return unit_rows(topics + noise * drawn).astype(np.float32)

        if measure == DISTANT:
            rows = embedded(topics, common)
            values.append({DISTANT: passages.distant(rows @ rows.T)})
        else:
            queries, answers = (embedded(own, part) for part in noises)
            recall = paragraphs.recall(queries @ answers.T)
            values.append({SENTENCES: recall[recall[:, 1] > 0], DISTANT: np.full(2, np.nan)})  # too short for it
    return values[0], dict(zip(ORDER, values[1:], strict=True))


def halves_of(measure, documents=120, gain=0.0, repetitions=500, each=2):
    generators = map(np.random.default_rng, range(repetitions))
    return [tuple(measured(rng, measure, documents, gain, each) for _ in ("development", "test")) for rng in generators]


@pytest.fixture(scope="module", params=[pytest.param(DISTANT, marks=pytest.mark.nightly), SENTENCES])
def nothing(request):
    return request.param, halves_of(request.param)


def share_of_better(measure, halves, fault=None):
    outcomes = []
    for seed, ((_, development), (start, test)) in enumerate(halves):
        chosen = choose(ORDER, test if fault == "the best on test" else development, measure, seed)
        outcomes.append(judge(start, test[chosen], measure, seed).outcome)
    return outcomes.count("better") / len(outcomes)


def mean_gain(measure, halves):
    """Mean difference of candidates and start, in points."""
    statistic = STATISTICS[measure]
    pairs = [(start[measure], values[measure]) for _, (start, test) in halves for values in test.values()]
    return 100 * np.mean([statistic(after) - statistic(before) for before, after in pairs])


@pytest.mark.slow
def test_better_is_said_of_nothing_as_rarely_as_an_interval_promises(nothing):
    assert abs(mean_gain(*nothing)) < 0.6, "start and candidates are exchangeable"
    assert share_of_better(*nothing) <= 0.035


@pytest.mark.slow
def test_a_choice_by_test_rows_is_caught(nothing):
    assert share_of_better(*nothing, "the best on test") > 0.055


@pytest.mark.nightly
@pytest.mark.parametrize("confidence", [0.9, 0.8])
def test_narrow_intervals_are_caught(nothing, monkeypatch, confidence):
    monkeypatch.setattr(bootstrap, "_CONFIDENCE", confidence)
    assert share_of_better(*nothing) > 0.035


@pytest.mark.nightly
@pytest.mark.parametrize(("documents", "gain", "share"), [(120, 0.03, 0.4), (250, 0.03, 0.7), (500, 0.035, 0.9)])
def test_a_gain_of_three_points_is_seen(documents, gain, share):
    """With eight passages a document, as `adapt` cuts."""
    halves = halves_of(DISTANT, documents, gain, 40, each=8)
    assert 2.5 < mean_gain(DISTANT, halves) < 3.5
    assert share_of_better(DISTANT, halves) >= share


def folded(rng, documents, tilt):
    """The start and the closed form on documents whose passages differ alike in all directions, or more in some."""
    passages, parts = passages_of(documents, 8), ([], [])
    topics = np.repeat(rng.normal(size=(documents, 32)), 8, axis=0)
    rows = topics + 1.6 * rng.normal(size=topics.shape) * (1 + tilt * np.linspace(-1, 1, 32))
    for fold in range(FOLDS):
        inside = passages.owners % FOLDS == fold
        matrix = whitening(WithinSums.of(rows[~inside], passages.owners[~inside]))
        part = passages_of(inside.sum() // 8, 8)
        for values, own in zip(parts, (rows[inside], rows[inside] @ matrix), strict=True):
            unit = unit_rows(own).astype(np.float32)
            values.append({DISTANT: part.distant(unit @ unit.T)})
    return map(merged, parts)


@pytest.mark.slow
@pytest.mark.parametrize(("tilt", "repetitions", "low", "high"), [(0.0, 150, 0, 0.035), (0.8, 10, 1, 1)])
def test_better_of_few_documents_is_said_as_rarely_where_folds_share_their_fits(tilt, repetitions, low, high):
    fits = [folded(np.random.default_rng(seed), MIN_FOLDED, tilt) for seed in range(repetitions)]
    outcomes = [judge(*fit, DISTANT, seed, MIN_FOLDED).outcome for seed, fit in enumerate(fits)]
    assert low <= outcomes.count("better") / repetitions <= high


class Planted(_Adaptation):
    """Scores are planted by split: the choice, or the verdict, would be another with the rows of the other split."""

    builder = SimpleNamespace(make=lambda *_: None, load=lambda name: name)

    def _scored(self, test, encoder, weight=0.0):
        del weight
        best = {"development": ORDER[1], "test": ORDER[2]}[test.passages]
        worse = test.passages == "test" and encoder == ORDER[1]
        return {DISTANT: np.random.default_rng(0).beta(2, 2, 200) + 0.2 * (encoder == best) - 0.1 * worse}

    def _baselines(self, *_):
        return {}

    def _weight(self, test, _):
        assert test.passages == "development"
        return 1.0

    def _steps(self, test):
        assert test.passages == "development"
        return 1

    def _finish(self, verdict, chosen, *_):
        return chosen, verdict.outcome


def test_the_choice_reads_development_rows_alone_and_the_verdict_test_rows_alone(monkeypatch):
    monkeypatch.setattr("declutr.adaptation.job.search_examples", lambda *_: [])
    monkeypatch.setattr(scores.TestSet, "digest", "digest")
    state = SimpleNamespace(look=lambda _: 1, steps=1, seconds_left=0)
    adaptation = Planted(SimpleNamespace(seed=0, private=False), None, None, state, "start", None)
    adaptation.primary = DISTANT
    assert adaptation._chosen_and_judged(scores.TestSet("development"), scores.TestSet("test")) == (ORDER[1], "worse")


TEXTS = ["some words", "others", "some words and others"]


def drawn(counts, size=6, seed=0):
    """Embeddings of documents with these numbers of spans, around a point of each document."""
    rng, owners = np.random.default_rng(seed), np.repeat(np.arange(len(counts)), counts)
    return rng.normal(size=(len(counts), size))[owners] + rng.normal(size=(len(owners), size)), owners


def plain(embeddings, owners, power, shrinkage):
    unit = [row / np.sqrt(row @ row) for row in embeddings]
    size, scatter, degrees = len(unit[0]), 0, 0
    for document in set(owners.tolist()):
        rows = [row for row, owner in zip(unit, owners, strict=True) if owner == document]
        center = sum(rows) / len(rows)
        scatter = scatter + sum(np.outer(row - center, row - center) for row in rows)
        degrees += len(rows) - 1
    covariance = scatter / degrees
    covariance = (covariance / (np.trace(covariance) / size) + shrinkage * np.eye(size)) / (1 + shrinkage)
    values, vectors = np.linalg.eigh(covariance)
    return vectors @ np.diag(values**-power) @ vectors.T


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize(("power", "shrinkage"), [(0.25, 0.1), (0.5, 0.001), (1.0, 10.0)])
def test_whitening_of_any_number_of_blocks_equals_a_plain_writing(blocks, power, shrinkage, monkeypatch):
    monkeypatch.setattr("declutr.adaptation.candidates.POWER", power)
    monkeypatch.setattr("declutr.adaptation.candidates.SHRINKAGE", shrinkage)
    counts = [4, 2, 1, 3, 4, 4, 2, 5, 1, 4]
    embeddings, owners = drawn(counts)
    blocks = [np.isin(owners, part) for part in np.array_split(np.arange(len(counts)), blocks)]
    first, *others = [WithinSums.of(embeddings[block], owners[block]) for block in blocks]
    assert np.abs(whitening(sum(others, first)) - plain(embeddings, owners, power, shrinkage)).max() < 1e-10


def test_whitening_from_fewer_documents_than_dimensions_is_finite():
    matrix = whitening(WithinSums.of(*drawn([2, 2], size=64)))
    assert np.isfinite(matrix).all()
    assert np.linalg.eigvalsh(matrix).min() > 0


@pytest.mark.parametrize(
    ("embeddings", "owners", "words"),
    [
        (*drawn([1] * 5), ("5 documents", "one span", "two spans")),
        (np.repeat(drawn([1] * 3)[0], 4, axis=0), np.repeat(np.arange(3), 4), ("12 spans", "3 documents")),
    ],
    ids=["one span a document", "repeated text"],
)
def test_whitening_of_documents_without_spread_is_refused(embeddings, owners, words):
    with pytest.raises(UsageError, match=all_of(*words)):
        whitening(WithinSums.of(embeddings, owners))


def test_passages_are_spread_over_the_document_and_do_not_overlap():
    table = documents([24, 100, 47], 12)
    rows, owners = passage_ids(table, 10, VOCABULARY)
    assert owners.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2]
    tokens = table["tokens"].to_pylist()
    for row, owner, start in zip(rows, owners, [0, 12, 0, 24, 60, 84, 0, 12, 24], strict=True):
        assert row == [VOCABULARY.bos, *tokens[owner][start : start + 10], VOCABULARY.eos]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A folder of shards, and an encoder with a dense layer of its own made for them."""
    root = tmp_path_factory.mktemp("start")
    data, folder = shards(root / "data"), root / "encoder"
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    encoder = build_encoder(config_of(data, "unused"), tokenizer).eval()
    folder.mkdir()
    write_encoder(encoder, tokenizer, folder)
    torch.manual_seed(1)
    write_steps(folder, [Normalize(), Dense(nn.Linear(encoder.hidden_size, 5), nn.Tanh()), Normalize(), Normalize()])
    limits = json.loads((folder / "sentence_bert_config.json").read_text())
    (folder / "sentence_bert_config.json").write_text(json.dumps(limits | {"max_seq_length": 8}))
    return folder, data


def test_whitened_encoder_is_loaded_alike_by_everyone(start, tmp_path):
    encoder, sums = load_encoder(str(start[0])), WithinSums.of(*drawn([3] * 9, size=5))
    (tmp_path / "white").mkdir()
    write_whitened(encoder, sums, tmp_path / "white")
    expected = encoder.encode(TEXTS).astype(np.float64) @ whitening(sums)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    ours = load_encoder(str(tmp_path / "white"))
    theirs = SentenceTransformer(str(tmp_path / "white"), device="cpu")
    assert (ours.max_tokens, theirs.max_seq_length) == (8, 8)
    for loaded in (ours, theirs):
        assert np.abs(loaded.encode(TEXTS) - expected).max() < 1e-5
    kinds = "Transformer Pooling Normalize Dense Normalize Dense Normalize"
    assert " ".join(type(module).__name__ for module in theirs) == kinds


def test_sums_are_those_of_every_training_document_once(start, monkeypatch):
    folder, data = start
    monkeypatch.setattr("declutr.adaptation.candidates._BLOCK_DOCUMENTS", 20)
    encoder = load_encoder(str(folder))
    sums = within_sums(encoder, data)
    table = ShardSet(data, "train").take(np.arange(57))  # all of them, in one block
    vocabulary = vocabulary_of(encoder.tokenizer)
    rows, owners = passage_ids(table, encoder.max_tokens - vocabulary.num_specials, vocabulary)
    assert (sums.documents, sums.spans) == (57, len(rows))
    assert np.abs(sums.scatter - WithinSums.of(encoder.embed_ids(rows), owners).scatter).max() < 1e-9
