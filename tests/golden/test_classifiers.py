"""SentEval's own classes, run unmodified on synthetic features: our batched fits give the same scores, all decimals."""

import numpy as np
import pytest
import torch

from declutr.evaluation.senteval import protocols
from declutr.evaluation.senteval.classifier import examples
from declutr.evaluation.senteval.features import table
from declutr.evaluation.senteval.network import ClassifierConfig
from declutr.evaluation.senteval.protocols import Pairs, bins, relatedness
from declutr.evaluation.senteval.retrieval import recalls

pytestmark = [pytest.mark.golden, pytest.mark.usefixtures("one_thread")]
PRESETS = {"default": ClassifierConfig(), "prototyping": ClassifierConfig.prototyping()}
NAMES = (
    *("inner_MR_like", "inner_imbalanced", "kfold_TREC_like", "kfold_MRPC_like"),
    *("split_SST5_like", "split_probing_like", "split_probing_mlp50"),
)


@pytest.fixture(scope="module")
def cases(figures):
    arrays = figures.arrays("senteval_clf")
    return {
        case["name"]: (
            case,
            {key.split("/")[1]: value for key, value in arrays.items() if key.startswith(case["name"])},
        )
        for case in figures.json("senteval_clf")["cases"]
    }


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", NAMES)
def test_accuracies_are_the_recorded_ones(cases, name, preset):
    case, arrays = cases[name]
    if preset not in case["expected"]:
        pytest.skip("not recorded")
    expected = case["expected"][preset]
    config = PRESETS[preset].model_copy(update={"num_folds": case.get("kfold", 5), "num_hidden": case.get("nhid", 0)})
    parts = [
        examples(table(arrays[f"X_{part}"]), arrays[f"y_{part}"])
        for part in ("all", "train", "valid", "test")
        if f"X_{part}" in arrays
    ]
    protocol = {"InnerKFold": protocols.inner_kfold, "KFold": protocols.kfold, "Split": protocols.split}[case["kind"]]
    scores, _, of_folds = protocol(*parts, 1 + max(int(part.labels.max()) for part in parts), config)
    assert (scores["devacc"], scores["acc"]) == (expected["devacc"], expected["acc"])
    if "fold_acc" in expected:
        assert of_folds == expected["fold_acc"]
    if "f1" in expected:
        assert scores["f1"] == expected["f1"]


def test_relatedness_is_the_recorded_one(cases):
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


def test_scores_become_the_recorded_bins(cases):
    case, _ = cases["relatedness"]
    np.testing.assert_allclose(bins(case["encode_labels_in"]), case["encode_labels_out"], atol=1e-7)


def test_recalls_are_the_recorded_ones(cases):
    case, arrays = cases["retrieval"]
    images, captions = (torch.nn.functional.normalize(torch.from_numpy(arrays[name])) for name in ("X_img", "X_cap"))
    found = recalls(images[::5], captions)  # recorded with an image for each of its five captions
    to_text, to_image = case["expected"]["i2t"], case["expected"]["t2i"]  # of both, the median rank is the last
    assert list(found) == [*to_text[:3], *to_image[:3], to_text[3], to_image[3]]
    assert sum(found[:6]) / 6 == pytest.approx(case["expected"]["six_recall_mean"])
