"""STS aggregation of SentEval and of SimCSE's fork, and DeCLUTR's averages, against what their code gave."""

import math

import numpy as np
import pytest
import torch
from measures import deviation

from declutr.evaluation.senteval.scores import averages
from declutr.evaluation.senteval.similarity import aggregate, blockwise_uniformity, cosines
from declutr.trainer.objectives.scores import alignment, uniformity

pytestmark = pytest.mark.golden


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
        expected = {
            "downstream": case["downstream"],
            "downstream without SNLI": case["downstream_wo_SNLI"],
            "probing": case["probing"],
            "mean of downstream and probing": case["mean_of_means"],
            "all 28 tasks": case["all_28task_mean"],
        }
        off = deviation([found[name].value for name in expected], list(expected.values()))
        assert off < 1e-12
        assert not any(average.missing for average in found.values())


def test_alignment_and_uniformity_equal_the_recorded_ones(figures):
    """Recorded rows are not of unit length: scores normalise. Uniformity is over the pairs of x and y together."""
    arrays = {key: torch.tensor(value) for key, value in figures.arrays("align_uniform").items()}
    both = torch.cat([arrays["x"], arrays["y"]])
    assert deviation([alignment(arrays["x"], arrays["y"])], [arrays["align"]]) < 1e-10
    assert deviation([math.exp(uniformity(both))], [arrays["uniform_nolog"]]) < 1e-10
    for measure in (uniformity, blockwise_uniformity):
        assert deviation([measure(both)], [arrays["uniform_log"]]) < 1e-10


def flat(scores):
    """The official result of a task under our names."""
    if "all" in scores:
        return {"spearman.mean": scores["all"]["spearman"]["mean"]}
    if isinstance(scores.get("acc"), list):
        names = [f"{way}_r{k}" for way in ("i2t", "t2i") for k in (1, 5, 10)]
        recalls = [*scores["acc"][0][:3], *scores["acc"][1][:3]]
        return {**dict(zip(names, recalls, strict=True)), "devacc": scores["devacc"]}
    return scores
