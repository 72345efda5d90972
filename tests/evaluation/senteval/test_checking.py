"""Data that are not the published ones get no score unless that is asked for, and it is said what differs."""

import json
import shutil
from importlib.resources import files

import pytest
from messages import says
from sentevaldata import COMPLETE, write, write_binary, write_rest

from declutr.evaluation.senteval import data
from declutr.evaluation.senteval.data.checking import inspect, overview, published
from declutr.evaluation.senteval.data.loading import task_files
from declutr.evaluation.senteval.data.taskdata import MARKS
from declutr.evaluation.senteval.data.tasks import ALL_TASKS, find

real = pytest.mark.skipif(not COMPLETE.exists(), reason="no real task data beside the repository")


def distinct(count, word):
    return [f"{word} number {number} ." for number in range(count)]


def copy(task, target):
    for name in task_files(task):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(COMPLETE / name, target / name)


def test_every_task_has_published_figures_and_a_hash_of_each_file():
    assert set(published()) == {task.name for task in ALL_TASKS}
    bases = json.loads(files(data).joinpath("published.json").read_bytes())["basis"]
    for name, figures in published().items():
        assert figures["basis"] in bases
        assert set(figures["files"]) == (set() if name == "ImageCaptionRetrieval" else set(task_files(find(name))))
    scored = {year: sum(published()[f"STS{year}"]["rows"].values()) for year in range(12, 17)}
    assert scored == {12: 3108, 13: 1500, 14: 3750, 15: 3000, 16: 1186}  # the task papers' numbers, STS13 without SMT


@pytest.mark.parametrize(
    ("task", "ones", "zeros", "rows"),
    [
        ("SUBJ", 5000, 5000, ()),  # other sentences in the right number
        # princeton-nlp/SimCSE#84, facebookresearch/SentEval#63; printed as 99.60 in two papers
        ("SUBJ", 5000, 20, ("SUBJ: 5,020 rows", "published 10,000")),
        ("MR", 50, 24, ("MR: 74 rows", "published 10,662")),
    ],
)
def test_other_data_are_refused_and_scored_with_a_mark_when_asked(tmp_path, task, ones, zeros, rows):
    write_binary(tmp_path, distinct(ones, "good"), distinct(zeros, "bad"))
    refused, allowed = (inspect(find(task), tmp_path, allow) for allow in (False, True))
    assert (refused.standing, refused.usable, allowed.standing, allowed.usable) == (
        "refused",
        False,
        "unpublished",
        True,
    )
    says(refused.reason, "2 of 2 files differ", "get them again", "--download", *rows)
    assert ("rows" in refused.reason) == bool(rows)
    says(MARKS[allowed.standing], "not the published", "comparable")
    assert allowed.findings == refused.findings
    said = "\n".join(overview([refused, allowed]))
    says(said, "1 refused", "1 unpublished")
    assert "REFUSED" in said
    assert "NOT the published" in said
    assert "--allow-unchecked" in said


def test_missing_and_half_downloaded_files_are_told_apart(tmp_path):
    assert inspect(find("STS14"), tmp_path).standing == "missing"
    write(tmp_path, "downstream/STS/STS14-en-test/STS.gs.images.txt", "5\n")
    half = inspect(find("STS14"), tmp_path, allow_unchecked=True)  # what cannot be read cannot be scored
    assert half.standing == "refused"
    says(half.reason, "no STS.input.deft-forum.txt", "1 of 12 files")


def test_latin_1_where_utf_8_is_read(tmp_path):
    write_rest(tmp_path)
    for split in ("train", "dev", "test"):
        write(tmp_path, f"downstream/SST/binary/sentiment-{split}", "good\t1\nna\u00efve\t0\n", "latin-1")
    reason = inspect(find("SST2"), tmp_path).reason
    says(reason, "sentiment-train", "line 2", "byte 0xef", "utf-8", "1 lines", "latin-1 (ISO 8859-1)")


def test_data_without_a_known_hash_are_marked(every_task, monkeypatch):
    """Those of COCO, whose published files are pickles."""
    task = find("ImageCaptionRetrieval")
    says(inspect(task, every_task).reason, "rows", "published 25,000")
    read = inspect(task, every_task, allow_unchecked=True).data
    rows = {name: len(split) for name, split in read.splits.items()}
    monkeypatch.setitem(published()[task.name], "rows", rows)
    unverified = inspect(task, every_task)
    assert (unverified.standing, unverified.usable) == ("unverified", True)
    says(unverified.findings, "no hash", "numbers of rows match")
    says(MARKS["unverified"], "no hash", "comparable")


@real
def test_the_real_sets_are_recognised():
    for name in ("MR", "TREC", "SICK-R", "STS-B", "STS12"):
        inspection = inspect(find(name), COMPLETE)
        assert (inspection.standing, inspection.findings) == ("identical", ()), inspection.reason
    for name in ("Length", "BigramShift"):  # another collection in SentEval's format
        inspection = inspect(find(name), COMPLETE)
        assert inspection.standing == "refused"
        assert "published about 100,000" in inspection.reason


@real
@pytest.mark.parametrize(("old", "new", "number"), [(b"\n", b"\r\n", 10), (b" .", b".", 5), (b"5.000", b"4.999", 5)])
def test_any_other_byte_is_refused(tmp_path, old, new, number):
    task = find("STS12")
    copy(task, tmp_path)
    for name in task_files(task):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes().replace(old, new))
    inspection = inspect(task, tmp_path)
    assert inspection.standing == "refused"
    says(inspection.reason, f"{number} of 10 files differ from the published ones")


@real
def test_swapped_label_files_are_refused_by_name(tmp_path):
    """Two subsets of STS12 have 750 scores each: no count can tell that they were swapped."""
    task = find("STS12")
    copy(task, tmp_path)
    one, two = (tmp_path / task.folder / f"STS.gs.{name}.txt" for name in ("MSRpar", "surprise.OnWN"))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    says(inspect(task, tmp_path).reason, "STS.gs.MSRpar.txt has the content of", "STS.gs.surprise.OnWN.txt")


@real
def test_half_downloaded_sts_is_refused_with_its_rows(tmp_path):
    task = find("STS12")
    copy(task, tmp_path)
    names = [tmp_path / name for name in task_files(task)[:2]]
    lines = [path.read_bytes().split(b"\n") for path in names]
    names[0].write_bytes(b"\n".join(lines[0][:300]) + b"\n")
    says(inspect(task, tmp_path).reason, "STS.input.MSRpar.txt 300", "STS.gs.MSRpar.txt 750")
    names[1].write_bytes(b"\n".join(lines[1][:300]) + b"\n")
    says(inspect(task, tmp_path).reason, "STS12 MSRpar", "300 rows", "published 750")
