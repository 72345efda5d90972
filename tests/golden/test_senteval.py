"""SentEval's classes on synthetic features, its STS aggregation and that of SimCSE's fork, and DeCLUTR's averages.

All against what their code gave, run unmodified: our batched fits give the same scores, all decimals.
"""

import math

import numpy as np
import pytest
import torch
from measures import deviation

from declutr.evaluation.senteval import protocols, similarity
from declutr.evaluation.senteval.classifier import examples
from declutr.evaluation.senteval.features import table
from declutr.evaluation.senteval.network import ClassifierConfig
from declutr.evaluation.senteval.protocols import Pairs, bins, relatedness
from declutr.evaluation.senteval.retrieval import recalls
from declutr.evaluation.senteval.scores import averages
from declutr.evaluation.senteval.similarity import aggregate, blockwise_uniformity, cosines
from declutr.trainer.objectives.scores import alignment, uniformity

pytestmark = [pytest.mark.golden, pytest.mark.usefixtures("one_thread")]


def test_sts_aggregation_equals_the_recorded_one(figures):
    """Embeddings to cosines to correlations, per subset and together; zero vectors and ties included."""
    arrays = figures.arrays("sts_cases")
    for case in figures.json("sts_cases")["sts"]:
        subsets, off = {}, {}
        for name in case["sizes"]:
            one, two, gold, expected = (arrays[f"{case['name']}/{name}/{key}"] for key in ("e1", "e2", "gs", "cos"))
            subsets[name] = (cosines(one, two), gold)
            off[name] = np.abs(subsets[name][0] - expected).max()
        score = aggregate(subsets)
        for protocol in ("facebook", "simcse"):
            expected = case["expected"][protocol]
            for kind in ("pearson", "spearman"):
                ways = expected["all"][kind]
                off[protocol, kind] = deviation([score.scores[f"{kind}.{way}"] for way in ways], list(ways.values()))
                per = {name: part[kind] for name, part in expected["per"].items()}
                off[protocol, kind, "per"] = deviation([score.scores[f"{kind}.{n}"] for n in per], list(per.values()))
        assert max(off.values()) < 1e-12
        assert {name: len(score.items[f"spearman.{name}"]) for name in subsets} == case["sizes"]


def test_averages_equal_those_of_the_declutr_paper(figures):
    """Its own aggregation over the numbers of its first paper's tables, for nine models; the script's "all" too."""
    for case in figures.json("sts_cases")["aggregate"]:
        found = {average.name: average for average in averages({k: flat(v) for k, v in case["results"].items()})}
        expected = {"downstream": case["downstream"], "downstream without SNLI": case["downstream_wo_SNLI"]}
        expected |= {"probing": case["probing"], "mean of downstream and probing": case["mean_of_means"]}
        expected |= {"all 28 tasks": case["all_28task_mean"]}
        assert deviation([found[name].value for name in expected], list(expected.values())) < 1e-12
        assert not any(average.missing for average in found.values())


def test_alignment_and_uniformity_equal_the_recorded_ones(figures, monkeypatch):
    """Recorded rows are not of unit length: scores normalise. Uniformity is over the pairs of x and y together."""
    monkeypatch.setattr(similarity, "_BLOCK", 10)
    arrays = {key: torch.tensor(value) for key, value in figures.arrays("align_uniform").items()}
    both = torch.cat([arrays["x"], arrays["y"]])
    assert deviation([alignment(arrays["x"], arrays["y"])], [arrays["align"]]) < 1e-10
    assert deviation([math.exp(uniformity(both))], [arrays["uniform_nolog"]]) < 1e-10
    for measure in (uniformity, blockwise_uniformity):
        assert deviation([measure(both)], [arrays["uniform_log"]]) < 1e-10


def flat(scores):
    if "all" in scores:
        return {"spearman.mean": scores["all"]["spearman"]["mean"]}
    if isinstance(scores.get("acc"), list):
        names = [f"{way}_r{k}" for way in ("i2t", "t2i") for k in (1, 5, 10)]
        recalls = [*scores["acc"][0][:3], *scores["acc"][1][:3]]
        return {**dict(zip(names, recalls, strict=True)), "devacc": scores["devacc"]}
    return scores


PRESETS = {"default": ClassifierConfig(), "prototyping": ClassifierConfig.prototyping()}
INNER, KFOLD = ("inner_MR_like", "inner_imbalanced"), ("kfold_TREC_like", "kfold_MRPC_like")


@pytest.fixture(scope="module")
def cases(figures):
    arrays = figures.arrays("senteval_clf")
    recorded = {case["name"]: case for case in figures.json("senteval_clf")["cases"]}
    names = {name: [key for key in arrays if key.startswith(name)] for name in recorded}
    return {name: (case, {key.split("/")[1]: arrays[key] for key in names[name]}) for name, case in recorded.items()}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", [*INNER, *KFOLD, "split_SST5_like", "split_probing_like"])
def test_accuracies_are_the_recorded_ones(cases, name, preset):
    case, arrays = cases[name]
    if preset not in case["expected"]:
        pytest.skip("not recorded")
    expected = case["expected"][preset]
    config = PRESETS[preset].model_copy(update={"num_folds": case.get("kfold", 5)})
    parts = [
        examples(table(arrays[f"X_{part}"]), arrays[f"y_{part}"])
        for part in ("all", "train", "valid", "test")
        if f"X_{part}" in arrays
    ]
    protocol = {"InnerKFold": protocols.inner_kfold, "KFold": protocols.kfold, "Split": protocols.split}[case["kind"]]
    scores, _, of_folds = protocol(*parts, 1 + max(int(part.labels.max()) for part in parts), config)
    names = ["devacc", "acc", *(name for name in ("fold_acc", "f1") if name in expected)]
    assert {name: (scores | {"fold_acc": of_folds})[name] for name in names} == {name: expected[name] for name in names}


def test_relatedness_and_the_bins_of_its_scores_are_the_recorded_ones(cases):
    case, arrays = cases["relatedness"]
    parts = [
        Pairs(table(arrays["X_A"][start:end], arrays["X_B"][start:end]), arrays["y_score"][start:end])
        for start, end in case["split"]
    ]
    (scores, predicted, num_passes), expected = relatedness(*parts), case["expected"]
    assert num_passes == case["epochs"]
    names = ("devpearson", "pearson", "spearman")
    np.testing.assert_allclose([scores[name] for name in names], [expected[name] for name in names], atol=1e-5, rtol=0)
    np.testing.assert_allclose(predicted, arrays["yhat"], atol=1e-5, rtol=0)
    np.testing.assert_allclose(bins(case["encode_labels_in"]), case["encode_labels_out"], atol=1e-7)


def test_recalls_are_the_recorded_ones(cases):
    case, arrays = cases["retrieval"]
    images, captions = (torch.nn.functional.normalize(torch.from_numpy(arrays[name])) for name in ("X_img", "X_cap"))
    found = recalls(images[::5], captions)  # recorded with an image for each of its five captions
    to_text, to_image = case["expected"]["i2t"], case["expected"]["t2i"]  # of both, the median rank is the last
    assert list(found) == [*to_text[:3], *to_image[:3], to_text[3], to_image[3]]
    assert sum(found[:6]) / 6 == pytest.approx(case["expected"]["six_recall_mean"])
