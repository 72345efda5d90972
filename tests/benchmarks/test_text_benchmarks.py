"""Benchmarks of SimCSE, SCD, SCL and SupCon run for real on tiny models: keys and equality, never times."""

import json

import numpy as np
import pytest
import torch

from benchmarks.step import __main__ as step
from benchmarks.step import batch, feed, padded_texts
from benchmarks.workload import models, packed, texts
from declutr.pipeline.shards.content import NO_LABEL
from declutr.trainer.objectives.span_config import SpanConfig
from declutr.trainer.objectives.text_packing import Texts

TINY = ["--model", "tiny", "--device", "cpu"]


def figures(main, tmp_path, *arguments):
    path = tmp_path / "figures.json"
    main([*arguments, "--json", str(path)])
    return json.loads(path.read_text())


@pytest.mark.parametrize("objective", packed.OBJECTIVES)
def test_benchmark_of_a_text_step_has_figures(tmp_path, objective):
    """Loss and gradient equal those of the released layout in float64, with sentences that differ between views."""
    short = ("--documents", "5", "--steps", "2", "--warm-up", "0", "--projector", "24", "16")
    found = figures(step.main, tmp_path, *TINY, "--objective", objective, *short)
    assert (found["objective"], found["documents"]) == (objective, 5)
    assert found["loss_abs_diff"] < 1e-4
    assert found["grad_rel_diff"] < 0.1  # fresh weights give nearly equal embeddings: float32 loses most digits
    assert found["grad_rel_diff_float64"] < 1e-9
    assert (found["padding_share"], found["dropout"]) == (0, [0.05, 0.15] if objective == "scd" else [0.1, 0.1])
    assert 0 < found["padding_share_released"] < 1
    for part in (found, found["with_attention_dropout"]):
        assert len(part["times"]["ours"]) == len(part["times"]["released"]) == len(part["ratios"]) == 2
        assert part["ratio_range"][0] <= part["ratio_median"] <= part["ratio_range"][1]


@pytest.mark.slow
def test_benchmark_of_a_supcon_step_has_figures(tmp_path):
    """Whole clips have the loss and gradient of the released layout; short ones are padded there."""
    found = figures(step.main, tmp_path, *TINY, "--objective", "supcon", "--documents", "3", "--steps", "2")
    assert (found["objective"], found["padding_share_released"]) == ("supcon", 0)
    assert 0 < found["audio"]["padding_share_released"] < 1
    for part in (found, found["audio"]):
        assert part["loss_abs_diff"] < 1e-4
        assert part["grad_rel_diff_float64"] < 1e-9
        assert len(part["times"]["ours"]) == len(part["times"]["released"]) == 2


@pytest.mark.parametrize("content", ["images", "audio"])
def test_benchmark_of_feeding_clips_has_figures(tmp_path, content):
    found = figures(feed.main, tmp_path, "--content", content, "--documents", "2", "--seconds", "0.01")
    assert (found["content"], found["rows_per_step"]) == (content, 2)
    assert found["rows_per_second_per_core"] > 0


@pytest.mark.slow
def test_benchmark_of_simcse_batches_has_figures(tmp_path):
    sizes = ("--sizes", "4", "8", "--microbatch-tokens", "100")
    found = figures(batch.main, tmp_path, *TINY, "--objective", "simcse", *sizes)
    assert found["objective"] == "simcse"
    assert found["sizes"]["8"]["microbatches"] > found["sizes"]["4"]["microbatches"] > 1
    assert found["sizes"]["8"]["spans"] == 16
    assert found["ratio_16384_to_64"] is None
    assert found["grad_rel_diff"] < 1e-3


@pytest.mark.parametrize(("pairs", "labels"), [(False, [NO_LABEL]), (True, [NO_LABEL, 0, 1, 2])])
def test_rows_have_the_lengths_of_real_texts(pairs, labels):
    rows = texts.text_rows(2, 400, pairs, 1000, seed=1)
    assert rows.slice(5, 3).equals(texts.text_rows(7, 3, pairs, 1000, seed=1))
    assert all(row == labels for row in rows.column("labels").to_pylist())
    read = Texts(rows)
    assert read.sizes.min() >= 1
    assert read.tokens.min() >= 4
    assert read.tokens.max() < 999
    first = read.sizes[read.first]
    known = texts._PREMISE if pairs else texts._SENTENCE
    assert abs(np.median(first) - known[10]) <= 2
    assert len({row["id"] for row in rows.to_pylist()}) == 400


def test_released_views_drop_with_their_own_rates():
    dropout = padded_texts.AlternatingDropout((0.1, 0.6))
    torch.manual_seed(0)
    dropped = dropout(torch.ones(2, 100_000)) == 0
    assert dropped.double().mean(dim=1).tolist() == pytest.approx([0.1, 0.6], abs=0.01)
    model = models.padded_model("tiny", 0.0, 0, 0.0)
    ids = torch.randint(4, 900, (1, 9)).expand(4, -1)
    padded_texts.alternate_dropout(model, (0.0, 0.0), (0.0, 0.5))
    hidden = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    torch.testing.assert_close(hidden[0], hidden[2])
    assert not torch.allclose(hidden[1], hidden[3])
    assert not torch.allclose(hidden[0], hidden[1])


@pytest.mark.parametrize(("objective", "of_a_row"), [("simcse", 1), ("scd", 1), ("scl", 4)])
def test_rows_fit_the_objective(objective, of_a_row):
    workload = packed.TextWorkload("tiny", SpanConfig(), 0, objective=packed.OBJECTIVES[objective])
    assert [len(labels) for labels in workload.rows(0, 2).column("labels").to_pylist()] == [of_a_row] * 2


def test_a_premise_of_three_pairs_is_padded_three_times():
    workload = packed.TextWorkload("tiny", SpanConfig(), 0, objective=packed.OBJECTIVES["scl"])
    batch_ = workload.batch(0, 4)
    padded = padded_texts.pad_texts(batch_, 1, torch.device("cpu"))
    premises, hypotheses = padded.groups
    assert len(premises[0]) == len(hypotheses[0]) == batch_.num_rows == 12
    lengths = batch_.spans.lengths.view(4, 4)
    assert padded.num_tokens == 3 * int(lengths[:, 0].sum()) + int(lengths[:, 1:].sum())
    assert premises[0].shape[1] == int(lengths[:, 0].max())
