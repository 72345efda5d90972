"""Every format is read as SentEval's own loader reads it; files elsewhere are found, and damaged ones refused."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from messages import all_of
from sentevaldata import PROBING, write, write_binary, write_retrieval

from declutr.common.errors import DataError, MissingDataError, UsageError
from declutr.evaluation.senteval.data import inspect, load
from declutr.evaluation.senteval.tasks import DOWNSTREAM, TASKS, find, sentence_rows, sentences


def rows(split):
    texts = split.first if split.second is None else zip(split.first, split.second, strict=True)
    return list(zip(texts, split.labels.tolist(), strict=True))


def test_twenty_eight_tasks_are_known_by_name_and_by_label(every_task):
    assert (len(TASKS), len(DOWNSTREAM), len(PROBING)) == (28, 18, 10)
    assert find("sick-r").name == "SICKRelatedness"
    assert find("SentLen") is find("length")
    with pytest.raises(UsageError, match=all_of("'STS17'", "`STS16`", "CR, MR")):
        find("STS17")
    tasks = {task.name: load(task, every_task) for task in TASKS}
    for name, data in tasks.items():
        assert data.num_rows
        assert set(data.files) == set(find(name).paths)
    assert tasks["SUBJ"].classes == ("subjective", "objective")
    assert "SMT" not in tasks["STS13"].splits
    assert tasks["Depth"].classes == ("10", "5", "6")  # of labels in train, by name
    assert sorted(rows(tasks["Depth"].splits["dev"])) == [
        (f"Words of {label} .", number) for number, label in enumerate(("10", "5", "6"))
    ]
    captions = tasks["ImageCaptionRetrieval"]
    assert captions.splits["test"].labels.tolist() == [0] * 5 + [1] * 5
    assert captions.splits["dev"].first[7] == "caption 7 of valid ."
    assert captions.features["train"].shape == (2, 4)
    texts = sentences(tasks["SICKEntailment"])
    assert len(texts) == len(set(texts)) == 5
    assert set(sentences(tasks["SICKRelatedness"])) == set(texts)
    numbers = sentence_rows(tasks[name] for name in ("SICKEntailment", "SICKRelatedness", "TREC"))
    assert list(numbers)[:5] == list(texts)
    assert sorted(numbers.values()) == list(range(5 + 3))


@pytest.mark.parametrize(("name", "split", "expected"), [
    # latin-1, sorted by length, then class
    ("MR", "all", [(".", 1), ("bad", 0), ("good", 1), ("a fine caf\u00e9 film", 1), ("a very long bad one", 0)]),
    ("TREC", "train", [("What is NASA ?", 0), ("Who is Jos\u00e9 ?", 3)]),
    ("TREC", "test", [("How far : a mile ?", 5)]),  # colons are kept, the fine label is not
    ("SST2", "dev", [("na\u00efve", 0), ("it is good", 1)]), ("SST5", "dev", [("bad", 0), ("very good", 4)]),
    ("MRPC", "test", [(("One .", "Two things ."), 0), (("He said so .", "So he said ."), 1)]),
    # the hypothesis' length leads; ties by the labels' names, in SentEval's numbers
    ("SNLI", "train",
     [(("a dog", "an animal"), 1), (("a man sleeps", "he sleeps"), 0), (("a man sleeps", "he is awake"), 2)]),
    ("SICK-E", "test", [(("A dog", "A dog"), 2), (("It rains", "It is dry"), 0), (("A dog runs", "A cat"), 1)]),
    ("SICK-R", "test",
     [(("A dog", "A dog"), 5.0), (("It rains", "It is dry"), 1.0), (("A dog runs", "A cat"), 3.3)]),
    ("STS-B", "dev", [(("a man", "a woman runs"), 0.25), (("a man", "a woman runs"), 5.0)]),
    ("STS12", "MSRpar",
     [(("d", "e"), 1.0), (("b", "c"), 3.25), (("a man", "a dog runs"), 5.0), (("three words here", "x"), 0.2)]),
    # of four rows, those that have a score
    ("STS15", "belief", [(("a man", "a dog runs"), 5.0), (("three words here", "x"), 0.2)]),
])  # fmt: skip
def test_rows_of_a_split_are_those_of_its_file_in_senteval_s_order(every_task, name, split, expected):
    assert rows(load(find(name), every_task).splits[split]) == expected


def test_ties_of_lengths_go_by_label_name_in_snli(tmp_path):
    for split in ("train", "dev", "test"):
        write(tmp_path, f"downstream/SNLI/s1.{split}", "a\nb\nc\n")
        write(tmp_path, f"downstream/SNLI/s2.{split}", "d\ne\nf\n")
        write(tmp_path, f"downstream/SNLI/labels.{split}", "neutral\nentailment\ncontradiction\n")
    assert load(find("SNLI"), tmp_path).splits["train"].labels.tolist() == [2, 0, 1]


def test_pickles_are_never_opened(tmp_path):
    (tmp_path / "downstream/COCO").mkdir(parents=True)

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    for split in ("train", "valid", "test"):
        (tmp_path / f"downstream/COCO/{split}.pkl").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match=all_of("test.pkl, train.pkl, valid.pkl", "pickles")):
        load(find("COCO"), tmp_path)
    write_retrieval(tmp_path)
    np.save(tmp_path / "downstream/COCO/valid.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=all_of("valid.npy", "Python objects")):
        load(find("COCO"), tmp_path)
    assert not (tmp_path / "ran").exists()


SST2 = "downstream/SST/binary/sentiment-dev"


@pytest.mark.parametrize(("name", "file", "text", "said"), [
    ("SST2", SST2, "good\t1\nbad\n", ("sentiment-dev", "line 2", "cut short", "'bad'")),
    ("SST5", "downstream/SST/fine/sentiment-dev", "4 good\n7 odd\n", ("line 2", "class 7", "0..4")),
    ("TREC", "downstream/TREC/TREC_10.label", "WHO:x y z\n", ("'WHO'", "ABBR")),
    ("SNLI", "downstream/SNLI/labels.dev", "neutral\nneutral\n-\n", ("line 3", "'-'", "entailment")),
    ("TREC", "downstream/TREC/TREC_10.label", "NUM:x How ?\n\nNUM:x So ?\n", ("TREC_10.label", "line 2", "blank")),
    ("SST2", SST2, "good\t1\n \n", ("sentiment-dev", "line 2", "blank")),
    ("STS-B", "downstream/STS/STSBenchmark/sts-dev.csv", "\n", ("sts-dev.csv", "line 1", "blank")),
    ("Tense", "probing/past_present.txt", "tr\tPAST\tIt .\n\n", ("past_present.txt", "line 2", "blank")),
    ("SNLI", "downstream/SNLI/s2.dev", "he\n", ("s1.dev 3", "s2.dev 1", "labels.dev 3", "download")),
    ("MRPC", "downstream/MRPC/msr_paraphrase_test.txt", "1\t2\t3\ta\tb\n", "no header"),
    ("STS-B", "downstream/STS/STSBenchmark/sts-dev.csv", "a\tb\tc\td\tnan\te\tf\n", ("score nan", "0..5")),
    ("STS13", "downstream/STS/STS13-en-test/STS.gs.FNWN.txt", "5\n", ("STS.input.FNWN.txt 4", "STS.gs.FNWN.txt 1")),
    ("Tense", "probing/past_present.txt", "tr\tPAST\tIt was .\nva\tPAST\tSo .\n", "no test rows"),
    ("Tense", "probing/past_present.txt", "tr\tA\tx\nva\tA\ty\nte\tB\tz\n", ("test", "train", "B")),
    ("SST2", SST2, "<!DOCTYPE html><html>404", "web page"), ("SST2", SST2, "", ("empty", "download")),
    ("Tense", "probing/past_present.txt", "version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ("MR", "downstream/MR/rt-polarity.pos", "PK\3\4\0\0", "zero bytes"),
])  # fmt: skip
def test_unreadable_line_is_named(every_task, tmp_path, name, file, text, said):
    for path in find(name).paths:
        write(tmp_path, path, (every_task / path).read_text(encoding="latin-1"), "latin-1")
    write(tmp_path, file, text)
    with pytest.raises(DataError, match=all_of(said)):
        load(find(name), tmp_path)


@pytest.mark.parametrize("folder", ["", "data/downstream", "data/downstream/MR", "gone"])
def test_where_files_belong_is_said_when_they_are_elsewhere(tmp_path, folder):
    write_binary(tmp_path / "data")
    place = str(tmp_path / folder / "downstream/MR")
    with pytest.raises(MissingDataError, match=all_of((place, "rt-polarity.pos", "--data", "downstream/", "case"))):
        load(find("MR"), tmp_path / folder)


def test_the_documents_name_every_file():
    text = (Path(__file__).resolve().parents[3] / "docs/guides/evaluate.md").read_text(encoding="utf-8")
    layout = text.partition("```text\nDIR/downstream/CR/")[2].partition("```")[0]
    for task in TASKS:
        assert f"DIR/{task.folder}/" in f"DIR/downstream/CR/{layout}", task.folder
        shown = task.files if task.procedure == "similarity" else [name.rpartition("/")[2] for name in task.paths]
        for name in shown:
            assert name in layout.split(), name


PARTS = [b"\n", b"\xef\xbb\xbf", b"\r\n\r\n", b"\x85\n", b"\x93NUMPY\x01\x00v\x00{'descr': 'O'}", b"te\tA\tb\n"]
TEXT = st.text("01\t\n\r .5aNtrvae-", max_size=40).map(str.encode)
DAMAGE = st.one_of(st.binary(max_size=40), TEXT, st.sampled_from(PARTS))
FIXTURE = [HealthCheck.function_scoped_fixture]


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=FIXTURE)
@given(data=st.data(), damage=DAMAGE, keep=st.sampled_from(["nothing", "before", "after", "half"]))
def test_a_damaged_file_is_refused_or_read(every_task, tmp_path, data, damage, keep):
    task = data.draw(st.sampled_from(TASKS))
    name = data.draw(st.sampled_from(task.paths))
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    for path in task.paths:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(every_task / path, copy / path)
    whole = (copy / name).read_bytes()
    raw = {"nothing": damage, "before": whole + damage, "after": damage + whole, "half": whole[: len(whole) // 2]}[keep]
    (copy / name).write_bytes(raw)
    inspection = inspect(task, copy)
    assert inspection.standing == "refused"  # sets this small are never the published ones
    assert inspection.reason
