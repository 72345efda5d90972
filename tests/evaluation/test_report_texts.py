"""What a report and `declutr inspect` say of rows of short texts, against the shards."""

import re
from collections import Counter

import numpy as np
import pytest
from messages import says
from textshards import prepare_rows

from declutr.cli.main import main
from declutr.evaluation.report.content import bar_charts, gather
from declutr.report.corpus import write_corpus_page
from declutr.evaluation.report.rows import TextLengths
from declutr.pipeline.shards.content import LABELS
from declutr.pipeline.shards.shards import ShardSet


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """60 premises with one to four hypotheses of growing length; some pairs are dropped."""
    rows = [
        {"premise": f"Premise {n} " + "word " * (n % 40), "hypothesis": f"{'It is so. ' * k} {k}", "label": k % 3}
        for n in range(60)
        for k in range(1 + n % 4)
    ]
    rows += [{"premise": "x", "hypothesis": "<script>alert(1)</script>", "label": "-"}] * 3
    rows += [{"premise": "<script>alert(2)</script>", "hypothesis": "y", "label": 0}]
    return prepare_rows(tmp_path_factory.mktemp("report") / "pairs", "pairs", rows)


def expected(folder):
    lengths, numbers = {}, Counter()
    for split in ("train", "held-out"):
        shards = ShardSet(folder, split)
        for row in shards.take(np.arange(shards.num_documents)).to_pylist():
            sizes = np.diff([*row["starts"], row["num_tokens"]]).tolist()
            for size, label in zip(sizes, row["labels"], strict=True):
                lengths.setdefault("premise" if label < 0 else LABELS[label], Counter())[size] += 1
            numbers[len(sizes) - 1] += 1
    return lengths, numbers


def test_lengths_labels_and_numbers_are_those_of_the_shards(pairs):
    folder, manifest = pairs
    content = gather(folder)
    lengths, numbers = expected(folder)
    assert {role: found.counts for role, found in content.texts.lengths.items()} == lengths
    assert content.texts.hypotheses == numbers
    charts = {chart.name: chart for chart in bar_charts(content)}
    assert {bar.label: bar.value for bar in charts["labels"].bars} == manifest.labels
    assert {bar.label: bar.value for bar in charts["hypotheses"].bars} == {
        f"{number} hypotheses": count for number, count in numbers.items()
    }
    assert sum(bar.value for bar in charts["texts"].bars) == sum(map(Counter.total, lengths.values()))
    assert [bar.label for bar in charts["reasons"].bars] == ["no_gold_label"]


@pytest.mark.parametrize("lengths", [[3], [1, 2], [5] * 99 + [70], list(range(1, 1001))])
def test_quantiles_are_those_of_numpy(lengths):
    found = TextLengths(Counter(lengths))
    for part in (0.5, 0.95, 0.99, 1.0):
        assert found.quantile(part) == np.quantile(lengths, part, method="inverted_cdf")
    assert found.mean == np.mean(lengths)


def test_the_page_shows_texts_and_no_windows(pairs, tmp_path):
    folder, manifest = pairs
    page = write_report(folder, tmp_path).read_text()
    for told in ("Lengths of texts in tokens", "Premises by number of hypotheses", "Kept hypotheses by label"):
        assert told in page
    assert "no_gold_label" in page
    assert "<script" not in page
    assert "spans up to" not in page
    assert "entailment: " in page
    assert f"{manifest.labels['neutral']:,} neutral" in page
    charts = {path.name for path in (tmp_path / "charts").iterdir()}
    assert {"texts.png", "hypotheses.png", "labels.png", "reasons.png"} <= charts
    assert "lengths.png" not in charts


def test_inspect_shows_rows(pairs, capsys):
    folder, _ = pairs
    assert main(["inspect", str(folder), "--documents", "2"]) == 0
    told = capsys.readouterr().out
    says(told, "rows of pairs")
    assert len(re.findall(r"^    premise +\d+ tokens  \S", told, re.MULTILINE)) == 2
    entry = next(ShardSet(folder, "train").take(np.array([3]))["id"].to_pylist().__iter__()).hex()
    assert main(["inspect", str(folder), "--document", entry]) == 0
    assert "    entailment " in capsys.readouterr().out


def test_sentences_have_lengths_but_no_labels(tmp_path, capsys):
    folder, manifest = prepare_rows(
        tmp_path / "s", "sentences", [{"text": f"Sentence {n}. " * (n % 5)} for n in range(40)]
    )
    assert manifest.dropped == {"empty": 8}
    content = gather(folder)
    assert content.texts.lengths.keys() == {"sentence"}
    assert content.texts.lengths["sentence"].num_texts == 32
    assert not {"hypotheses", "labels"} & {chart.name for chart in bar_charts(content)}
    page = write_report(folder).read_text()
    assert "one text a row" in page
    assert "Premises by" not in page
    assert main(["inspect", str(folder)]) == 0
    assert "    sentence " in capsys.readouterr().out
