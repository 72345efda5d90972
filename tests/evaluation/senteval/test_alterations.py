"""Rows that are not the published ones, each with what is said of it; the published figures are those of small sets."""

import pytest
from messages import says
from sentevaldata import COMPLETE, write
from sentevalsets import write_sets

from declutr.evaluation.senteval.checks.alterations import check_rows
from declutr.evaluation.senteval.checks.checking import inspect
from declutr.evaluation.senteval.checks.published import Published, PublishedSplit, digests_of, letters, published
from declutr.evaluation.senteval.data.loading import load, task_files
from declutr.evaluation.senteval.data.tasks import TASKS, find

STS15 = find("STS15").folder
STSB = "downstream/STS/STSBenchmark"
MR = ("downstream/MR/rt-polarity.pos", "downstream/MR/rt-polarity.neg")
COLUMNS = {"STS-B": 5, "SICK-R": 1, "MRPC": 3, "STS15": 0}


def write_all(folder):
    write_sets(folder, rows=30)
    for subset in find("STS15").subsets:
        pairs = [f"{subset} row {number} , it 's first .\tits {number} second ." for number in range(24)]
        write(folder, f"{STS15}/STS.input.{subset}.txt", "".join(f"{pair}\n" for pair in pairs))
        gold = ["" if number % 3 else f"{number % 6}" for number in range(24)]
        write(folder, f"{STS15}/STS.gs.{subset}.txt", "".join(f"{one}\n" for one in gold))
    return folder


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """By task, as if these sets were the published ones."""
    folder, found = write_all(tmp_path_factory.mktemp("published")), {}
    for name in ("MR", "TREC", "MRPC", "SICK-R", "SICK-E", "STS-B", "STS15", "SST2"):
        data = load(find(name), folder)
        splits = {
            part: PublishedSplit(rows=len(split), unscored=split.num_unscored, digests=digests_of(data, split))
            for part, split in data.splits.items()
        }
        found[name] = Published(basis="files", splits=splits)
    return found


def lines_of(folder, name):
    return (folder / name).read_text(encoding="utf-8").splitlines()


def put(folder, name, lines):
    write(folder, name, "".join(f"{line}\n" for line in lines))


def rotated_gold(folder, task):
    """One line on: scored and unscored rows change places."""
    for name in task_files(find(task))[1::2]:
        lines = lines_of(folder, name)
        put(folder, name, [*lines[1:], lines[0]])


def gold_by_three(folder, task):
    """So that the scored labels and their number are the same, beside other pairs' rows."""
    name = task_files(find(task))[1]
    lines = lines_of(folder, name)
    scored = [line for line in lines if line]
    places = iter(scored)
    put(folder, name, [next(places) if number % 3 == 1 else "" for number in range(len(lines))])


def over_columns(change):
    """`change` takes all first and all second sentences of each file of pairs."""

    def damage(folder, task):
        at, files = COLUMNS[task], task_files(find(task))
        for name in files[::2] if task.startswith("STS1") else files:
            head = 1 if task in ("SICK-R", "MRPC") else 0
            lines = lines_of(folder, name)
            cells = [line.split("\t") for line in lines[head:]]
            first, second = change([row[at] for row in cells], [row[at + 1] for row in cells])
            for row, one, two in zip(cells, first, second, strict=True):
                row[at : at + 2] = [one, two]
            put(folder, name, [*lines[:head], *("\t".join(row) for row in cells)])

    return damage


shifted = over_columns(lambda first, second: (first, [*second[1:], second[0]]))
swapped = over_columns(lambda first, second: (second, first))
upper = over_columns(lambda first, second: ([text.title() for text in first], [text.title() for text in second]))
translated = over_columns(lambda first, second: ([f"zz {t}" for t in first], [f"yy {t}" for t in second]))


def exchanged(folder, _):
    one, two = (lines_of(folder, name) for name in MR)
    put(folder, MR[0], [*two[:9], *one[9:]])
    put(folder, MR[1], [*one[:9], *two[9:]])


def repeated(folder, _):
    for name in MR:
        lines = lines_of(folder, name)
        put(folder, name, lines[:3] * 10)


def reordered(folder, _):
    put(folder, MR[0], reversed(lines_of(folder, MR[0])))


def other_scores(folder, _):
    name = f"{STSB}/sts-test.csv"
    cells = [line.split("\t") for line in lines_of(folder, name)]
    for row, other in zip(cells, [*cells[1:], cells[0]], strict=True):
        row.append(other[4])
    put(folder, name, ["\t".join([*row[:4], row[-1], *row[5:-1]]) for row in cells])


def another_set(folder, task):
    translated(folder, task)
    other_scores(folder, task)


@pytest.mark.parametrize(
    ("task", "damage", "level", "said"),
    [
        (
            "STS15",
            rotated_gold,
            "refuse",
            ("shifted", "reordered", "changed", "unscored"),
        ),
        ("STS15", gold_by_three, "refuse", ("lower correlation", "0")),
        ("STS15", shifted, "refuse", ("shifted", "exchanged", "classes")),
        ("SICK-R", shifted, "refuse", ("SICK-R test", "published sentences", "labels")),
        ("STS-B", shifted, "refuse", ("lower correlation", "0")),
        ("MRPC", shifted, "refuse", "always 1"),
        ("MR", exchanged, "refuse", ("MR", "published sentences", "labels")),
        ("MR", repeated, "refuse", ("MR", "6 rows", "published 60", "repeated")),
        ("MR", reordered, "warn", ("published rows", "order")),
        ("STS-B", swapped, "refuse", ("first", "second", "swapped")),
        ("STS15", swapped, "refuse", ("first", "second", "swapped")),
        ("STS-B", upper, "warn", "tokenization or case"),
        ("STS-B", translated, "warn", ("published labels", "different sentences", "translation")),
        ("STS-B", other_scores, "refuse", ("published sentences", "labels", "shifted")),
        (
            "STS-B",
            another_set,
            "refuse",
            ("another data set", "translation", "scores"),
        ),
    ],
)
def test_altered_rows_are_found_and_named(tmp_path, figures, task, damage, level, said):
    write_all(tmp_path)
    assert list(check_rows(load(find(task), tmp_path), figures[task], "always 1")) == []
    damage(tmp_path, task)
    findings = list(check_rows(load(find(task), tmp_path), figures[task], "always 1" if task[:2] == "MR" else ""))
    assert findings
    says([finding for finding in findings if finding.level == level], said)


def test_every_set_whose_files_were_at_hand_has_digests_of_all_rows():
    for task in TASKS:
        figures = published()[task.name]
        for name, split in figures.splits.items():
            known = figures.basis == "files" or (figures.basis == "snli" and name != "train")
            assert (split.digests is not None) == known, (task.name, name)


def test_sets_without_digests_are_said_to_be_unverified(tmp_path):
    write_all(tmp_path)
    unknown = Published(basis="probing", splits={"all": PublishedSplit(rows=60)})
    data = load(find("MR"), tmp_path)
    (finding,) = check_rows(data, unknown, "")
    assert (finding.level, "cannot be verified" in finding.what) == ("warn", True)
    repeated(tmp_path, "MR")
    assert any(finding.level == "refuse" for finding in check_rows(load(find("MR"), tmp_path), unknown, ""))


def test_letters_are_the_same_in_every_tokenization():
    forms = ("He said: \"it's (very) good\" & left.", "he said : `` it 's -LRB- very -RRB- good '' & left .",
             "he said : &quot; it &apos;s ( very ) good &quot; &amp; left .")  # fmt: skip
    assert {letters(form) for form in forms} == {"hesaiditsverygoodleft"}


@pytest.mark.skipif(not COMPLETE.exists(), reason="no real task data beside the repository")
@pytest.mark.parametrize("name", ["MR", "TREC", "SICK-E", "SICK-R", "STS-B", "STS12"])
def test_digests_are_those_of_the_published_files(name):
    data = load(find(name), COMPLETE)
    assert inspect(find(name), COMPLETE).standing == "identical"
    for part, split in data.splits.items():
        assert digests_of(data, split) == published()[data.task.name].splits[part].digests
