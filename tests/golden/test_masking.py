"""Masking against the recorded expectations and the recorded runs of the released code."""

import numpy as np
import pytest
from scipy import stats

from declutr.trainer.data.packing import MaskingConfig, Vocabulary, mask_tokens

pytestmark = pytest.mark.golden

P_VALUE = 1e-6


def specials(case):
    """<s>, <pad>, </s>, <unk> and, at the end of the vocabulary, <mask>, as in the recorded runs."""
    return np.array([0, 1, 2, 3, case["V"] - 1])


def masked(case, ids):
    """Masks rows as anchors 0, 1, 2... of documents; flat ids, new ids, selected."""
    rows, length = ids.shape
    key, place = np.repeat(np.arange(rows, dtype=np.uint64), length), np.tile(np.arange(length), rows)
    flat, epoch, anchor = ids.reshape(-1), np.zeros(ids.size, np.uint64), np.repeat(np.arange(rows) % 3, length)
    vocabulary = Vocabulary(case["V"], None, None, case["V"] - 1, tuple(specials(case).tolist()))
    new, selected = mask_tokens(MaskingConfig(), case["seed"], vocabulary, flat, key, epoch, anchor, place)
    return flat, new, selected


def inputs(case, arrays):
    recorded = arrays.get(f"{case['name']}/input")
    if recorded is not None:
        return recorded
    return np.random.default_rng(case["seed"]).integers(0, case["V"], (case["B"], case["T"]))


def test_masks_have_the_shares_of_bert(figures):
    """How many are selected and what becomes of them, by exact binomial tests."""
    cases, arrays = figures.json("mlm_cases"), figures.arrays("mlm_cases")
    for case in cases["cases"]:
        ids, new, selected = masked(case, inputs(case, arrays))
        size, mask_id = case["V"], case["V"] - 1
        eligible = int((~np.isin(ids, specials(case))).sum())
        count = int(selected.sum())
        was, now = ids[selected], new[selected]
        expected = {
            "mask": (now == mask_id, 0.8 + 0.1 / size),
            "unchanged": (now == was, 0.1 + 0.1 / size),
            "changed": ((now != was) & (now != mask_id), 0.1 * (1 - 2 / size)),
        }
        found = [stats.binomtest(count, eligible, cases["expected"]["p_select"]).pvalue]
        found += [stats.binomtest(int(hits.sum()), count, share).pvalue for hits, share in expected.values()]
        # Two runs of one law: the released one's selection and ours.
        table = [[count, eligible - count], [case["selected"], case["eligible"] - case["selected"]]]
        found.append(stats.fisher_exact(table).pvalue)
        assert min(found) > P_VALUE, (case["name"], found)


def test_specials_and_what_is_not_selected_stay(figures):
    arrays = figures.arrays("mlm_cases")
    for case in figures.json("mlm_cases")["cases"]:
        ids, new, selected = masked(case, inputs(case, arrays))
        assert np.isin(ids, specials(case)).any()
        assert not selected[np.isin(ids, specials(case))].any()
        assert (new[~selected] == ids[~selected]).all()


def test_replacements_cover_the_whole_vocabulary(figures):
    """Random replacements may be special ids or the token itself, as torch.randint(len(tokenizer)) may."""
    case = {"V": 50, "seed": figures.json("mlm_cases")["cases"][0]["seed"]}
    _, new, selected = masked(case, np.full((400, 512), 7))
    drawn = new[selected & (new != case["V"] - 1) & (new != 7)]
    counts = np.bincount(drawn, minlength=case["V"])
    others = np.delete(np.arange(case["V"]), [7, case["V"] - 1])
    assert stats.chisquare(counts[others]).pvalue > P_VALUE


def test_masks_of_tokens_are_independent():
    """Counts per row are binomial and neighbours do not know of each other: no whole-word masking, no fixed number."""
    case = {"V": 1000, "seed": 5}
    rows, length = 4000, 50
    _, _, selected = masked(case, np.full((rows, length), 7))
    table = selected.reshape(rows, length)
    counts = np.bincount(table.sum(1), minlength=length + 1)
    law = stats.binom(length, 0.15).pmf(np.arange(length + 1)) * rows
    kept = law >= 5
    observed, expected = np.append(counts[kept], counts[~kept].sum()), np.append(law[kept], law[~kept].sum())
    assert stats.chisquare(observed, expected).pvalue > P_VALUE
    left, right = table[:, 0::2].reshape(-1), table[:, 1::2].reshape(-1)
    pairs = np.bincount(2 * left + right, minlength=4).reshape(2, 2)
    assert stats.chi2_contingency(pairs).pvalue > P_VALUE


def test_chance_of_an_unmasked_span_follows_its_law(figures):
    """A span of n tokens without any selected one comes with the recorded probability, so MLM must bear it."""
    for length, probability in figures.json("mlm_cases")["expected"]["p_no_token_selected"].items():
        _, _, selected = masked({"V": 1000, "seed": 6}, np.full((20_000, int(length)), 7))
        empty = int((~selected.reshape(20_000, -1).any(1)).sum())
        assert stats.binomtest(empty, 20_000, probability).pvalue > P_VALUE
