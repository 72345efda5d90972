"""Data that are not the published ones get no score, and it is said what the score would have been."""

import json
import shutil
from pathlib import Path

import pytest
from messages import says
from sentevaldata import COMPLETE, write, write_binary, write_rest

from declutr.evaluation.senteval import checks
from declutr.evaluation.senteval.checks.checking import inspect
from declutr.evaluation.senteval.checks.published import published
from declutr.evaluation.senteval.data.loading import task_files
from declutr.evaluation.senteval.data.taskdata import MARKS
from declutr.evaluation.senteval.data.tasks import ALL_TASKS, find
from declutr.evaluation.senteval.download.downloading import overview

real = pytest.mark.skipif(not COMPLETE.exists(), reason="no real task data beside the repository")


def distinct(count, word="row"):
    return [f"{word} number {number} ." for number in range(count)]


def copy(task, target):
    for name in task_files(task):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(COMPLETE / name, target / name)


def test_every_task_has_published_figures_whose_classes_sum_to_the_rows():
    assert set(published()) == {task.name for task in ALL_TASKS}
    bases = json.loads(Path(checks.__file__).with_name("published.json").read_bytes())["basis"]
    for name, figures in published().items():
        assert figures.basis in bases
        for split, expected in figures.splits.items():
            if expected.classes:
                assert sum(expected.classes.values()) == expected.rows, (name, split)
        if figures.files:
            assert set(figures.files) == set(task_files(find(name)))
    scored = {year: sum(s.rows for s in published()[f"STS{year}"].splits.values()) for year in range(12, 17)}
    assert scored == {12: 3108, 13: 1500, 14: 3750, 15: 3000, 16: 1186}  # the task papers' numbers, STS13 without SMT


def test_the_right_numbers_of_other_sentences_are_marked(tmp_path):
    write_binary(tmp_path, distinct(5000, "objective"), distinct(5000, "subjective"))
    inspection = inspect(find("SUBJ"), tmp_path)
    assert (inspection.standing, inspection.usable, inspection.reason) == ("altered", True, "")
    says(MARKS[inspection.standing], "not the published", "comparable")
    files, rows = [finding.what for finding in inspection.findings]
    says(files, "2 of 2 files", "subj.objective, subj.subjective")
    says(rows, "SUBJ", "published labels", "different sentences", "translation")
    says("\n".join(overview([inspection])), "NOT the published", "marked")
    says("\n".join(overview([inspection])), "subj.objective", "subj.subjective")


@pytest.mark.parametrize(
    ("task", "ones", "zeros", "said", "effect"),
    [
        # ten rows repeated
        ("SUBJ", distinct(10, "objective") * 500, distinct(10, "subjective") * 500,
         ("SUBJ", "20 rows", "published 9,998", "repeated"), ("tested", "trained")),
        # princeton-nlp/SimCSE#84, facebookresearch/SentEval#63; printed as 99.60 in two papers
        ("SUBJ", distinct(5000, "objective"), distinct(20, "subjective"),
         ("SUBJ", "5,020 rows", "published 10,000", "20 subjective", "published 5,000"),
         ("'objective'", "5,000 of 5,020 rows", "99.60%")),
        # the corrupted MR of 74 lines
        ("MR", distinct(50, "good"), distinct(24, "bad"),
         ("MR", "74 rows", "published 10,662", "24 negative", "50 positive", "published 5,331"),
         ("50 of 74 rows", "67.57%", "1.35 points")),
        # a file copied over the other class
        ("MR", distinct(5331), distinct(5331), ("10,662 of 10,662 rows", "two classes"),
         "50%"),
    ],
    ids=["repeated", "SUBJ of 5,020 lines", "MR of 74 lines", "copied over"],
)  # fmt: skip
def test_corrupted_classes_are_refused_with_the_false_score(tmp_path, task, ones, zeros, said, effect):
    write_binary(tmp_path, ones, zeros)
    inspection = inspect(find(task), tmp_path)
    assert (inspection.standing, inspection.usable) == ("refused", False)
    says(inspection.reason, said)
    says(inspection.reason, effect)


def test_missing_and_half_downloaded_files_are_told_apart(tmp_path):
    assert inspect(find("STS14"), tmp_path).standing == "missing"
    write(tmp_path, "downstream/STS/STS14-en-test/STS.gs.images.txt", "5\n")
    half = inspect(find("STS14"), tmp_path, allow_unchecked=True)  # what cannot be read cannot be scored
    assert half.standing == "refused"
    assert "no STS.input.deft-forum.txt" in half.reason
    says(half.reason, "1 of 12 files")


def test_latin_1_where_utf_8_is_read(tmp_path):
    write_rest(tmp_path)
    for split in ("train", "dev", "test"):
        write(tmp_path, f"downstream/SST/binary/sentiment-{split}", "good\t1\nna\u00efve\t0\n", "latin-1")
    reason = inspect(find("SST2"), tmp_path).reason
    says(reason, "sentiment-train", "line 2", "byte 0xef", "utf-8", "1 lines")
    assert "latin-1 (ISO 8859-1)" in reason


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "na\u00efve caf\u00e9".encode().decode("latin-1"),
            ("1 rows", "UTF-8", "latin-1", "'\u00c3\u00af'"),
        ),
        ("a \u201cquoted\u201d word".encode().decode("latin-1"), ("1 rows", "UTF-8", "latin-1")),
    ],
)
def test_utf_8_where_latin_1_is_read(tmp_path, text, said):
    """A file saved as UTF-8: each accent becomes two characters under the official loader."""
    write_binary(tmp_path, [*distinct(5330, "good"), text], distinct(5331, "bad"))
    reason = inspect(find("MR"), tmp_path).reason
    says(reason, said)
    says(reason, "1 of 10,662 rows", "words")


def test_characters_lost_in_a_conversion_are_counted(tmp_path):
    write_rest(tmp_path)
    write(tmp_path, "downstream/SST/binary/sentiment-test", "caf\ufffd \ufffd\t1\nbad\t0\n")
    says([f.what for f in inspect(find("SST2"), tmp_path).findings], "2 characters", "U+FFFD")


def test_own_data_are_scored_when_asked_and_marked(tmp_path):
    write_rest(tmp_path)
    refused, allowed = (inspect(find("Tense"), tmp_path, allow) for allow in (False, True))
    says(refused.reason, "Tense train", "2 rows", "published about 100,000")
    assert (allowed.standing, allowed.usable) == ("unpublished", True)
    says(MARKS[allowed.standing], "not the published", "comparable")
    assert allowed.findings == refused.findings
    said = "\n".join(overview([refused, allowed]))
    assert "REFUSED" in said
    says(said, "NOT the published")
    assert "--allow-unchecked" in said


@real
def test_the_real_sets_are_recognised():
    for name in ("MR", "TREC", "SICK-R", "STS-B", "STS12"):
        inspection = inspect(find(name), COMPLETE)
        assert inspection.standing == "identical", inspection.reason
        assert not any(finding.level != "info" for finding in inspection.findings)
    for name in ("Length", "BigramShift"):  # another collection in SentEval's format
        inspection = inspect(find(name), COMPLETE)
        assert inspection.standing == "refused"
        assert "published about 100,000" in inspection.reason


@real
@pytest.mark.parametrize(
    ("old", "new", "standing", "said"),
    [
        ("\n", "\r\n", "published", ("10 of 10 files", "STS.input.MSRpar.txt")),
        (" .", ".", "altered", ("STS12 MSRpar", "untokenized", "published sentences")),
        (" '", "'", "altered", ("STS12 MSRpar", "tokenization or case", "published sentences")),
    ],
)
def test_any_other_byte_is_said_and_marked(tmp_path, old, new, standing, said):
    task = find("STS12")
    copy(task, tmp_path)
    for name in task_files(task):
        text = (tmp_path / name).read_text(encoding="utf-8").replace(old, new)
        (tmp_path / name).write_bytes(text.encode())
    inspection = inspect(task, tmp_path)
    assert inspection.standing == standing, inspection.reason
    assert MARKS[inspection.standing]
    says("\n".join(overview([inspection])), said)


@real
def test_swapped_label_file_is_refused_by_name(tmp_path):
    """Two subsets of STS12 have 750 scores each: no count can tell that they were swapped."""
    task = find("STS12")
    copy(task, tmp_path)
    where = tmp_path / task.folder
    one, two = where / "STS.gs.MSRpar.txt", where / "STS.gs.surprise.OnWN.txt"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    reason = inspect(task, tmp_path).reason
    says(reason, "STS.gs.MSRpar.txt", "downstream/STS/STS12-en-test/STS.gs.surprise.OnWN.txt")
    one.write_bytes(second.replace(b"\n", b"\r\n"))  # and under another hash
    reason = inspect(task, tmp_path).reason
    says(reason, "STS12 MSRpar", "labels", "not the published", "STS12 surprise.OnWN")
    says(reason, "lower correlation", "0")


@real
def test_half_downloaded_sts_is_refused_with_its_rows(tmp_path):
    task = find("STS12")
    copy(task, tmp_path)
    names = [tmp_path / name for name in task_files(task)[:2]]
    lines = [path.read_bytes().split(b"\n") for path in names]
    names[0].write_bytes(b"\n".join(lines[0][:300]) + b"\n")
    says(inspect(task, tmp_path).reason, "STS.input.MSRpar.txt 300", "STS.gs.MSRpar.txt 750")
    names[1].write_bytes(b"\n".join(lines[1][:300]) + b"\n")
    reason = inspect(task, tmp_path).reason
    says(reason, "STS12 MSRpar", "300 rows", "published 750")
    says(reason, "300 of 750 pairs", "5.8 points")


@real
def test_real_latin_1_saved_as_utf_8_is_refused(tmp_path):
    task = find("TREC")
    copy(task, tmp_path)
    path = tmp_path / task_files(task)[0]
    path.write_bytes(path.read_bytes().decode("latin-1").encode())
    says(inspect(task, tmp_path).reason, "1 rows", "UTF-8", "latin-1")


@real
def test_rows_shuffled_away_from_their_labels_are_refused(tmp_path):
    task = find("TREC")
    copy(task, tmp_path)
    path = tmp_path / task_files(task)[1]
    lines = path.read_bytes().splitlines()
    labels, texts = zip(*(line.split(b":", 1) for line in lines), strict=True)
    moved = (*labels[7:], *labels[:7])
    path.write_bytes(b"\n".join(label + b":" + text for label, text in zip(moved, texts, strict=True)) + b"\n")
    reason = inspect(task, tmp_path).reason
    says(reason, "TREC test", "labels", "not the published")
    says(reason, "published sentences")
    says(reason, "'DESC'", "138 of 500 rows", "27.60%")
