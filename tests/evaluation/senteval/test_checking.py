"""Data that are not the published ones get no score unless that is asked for; STS-B in ten languages."""

import json
from importlib.resources import files

import pytest
from fileserver import file_server
from messages import all_of, says
from scipy.stats import spearmanr
from sentevaldata import COMPLETE, TRANSLATED, write, write_binary, write_rest, write_translations

from declutr.cli.main import main
from declutr.common.errors import DataError
from declutr.encoders.loading import load_encoder
from declutr.evaluation.senteval.data import download, inspect, load, overview, published
from declutr.evaluation.senteval.similarity import cosines
from declutr.evaluation.senteval.tasks import ALL_TASKS, LANGUAGES, MARKS, SETS, STSB_MULTI, TASKS, choose_tasks, find


def distinct(count, word):
    return [f"{word} number {number} ." for number in range(count)]


def test_every_task_has_published_figures_and_a_hash_of_each_file():
    assert set(published()) == {task.name for task in ALL_TASKS}
    bases = json.loads(files("declutr.evaluation.senteval").joinpath("published.json").read_bytes())["basis"]
    for name, figures in published().items():
        assert figures["basis"] in bases
        assert set(figures["files"]) == (set() if name == "ImageCaptionRetrieval" else set(find(name).paths))
    scored = {year: sum(published()[f"STS{year}"]["rows"].values()) for year in range(12, 17)}
    assert scored == {12: 3108, 13: 1500, 14: 3750, 15: 3000, 16: 1186}  # the task papers' numbers, STS13 without SMT
    assert all(published()[name]["rows"] == {"dev": 1500, "test": 1379} for name in STSB_MULTI)


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
    says(reason, "sentiment-train", "line 2", "byte 0xef", "utf-8", "latin-1 (ISO 8859-1)")


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


@pytest.mark.skipif(not COMPLETE.exists(), reason="no real task data beside the repository")
def test_the_real_sets_are_recognised():
    for name in ("MR", "SST2", "TREC", "SICK-E", "SICK-R", "STS-B", "STS12"):
        inspection = inspect(find(name), COMPLETE)
        assert (inspection.standing, inspection.findings) == ("identical", ()), inspection.reason
        rows = {part: len(split) for part, split in inspection.data.splits.items()}
        assert rows == published()[find(name).name]["rows"]  # as SentEval's own loaders gave
    inspection = inspect(find("Length"), COMPLETE)  # another collection in SentEval's format
    assert inspection.standing == "refused"
    assert "published about 100,000" in inspection.reason


GERMAN = f"{TRANSLATED}/stsb-de-test.csv"


@pytest.fixture(scope="module")
def translations(tmp_path_factory):
    return write_translations(tmp_path_factory.mktemp("translations"))


def test_language_tasks_are_ten_beside_the_28_of_senteval():
    assert len(STSB_MULTI) == len(LANGUAGES) == 10
    assert [task.name for task in ALL_TASKS[28:]] == list(STSB_MULTI)
    assert choose_tasks(["stsb-multi", "sts-b"]) == ("STSBenchmark", *STSB_MULTI)
    assert choose_tasks(["STS-B-zh", "stsbenchmark-de"]) == ("STSBenchmark-de", "STSBenchmark-zh")
    for name in SETS.keys() - {"stsb-multi"}:
        assert not set(SETS[name]) & set(STSB_MULTI), name


def test_a_sentence_is_kept_as_published(translations):
    data = load(find("STS-B-de"), translations)
    split = data.splits["test"]
    assert split.first[0] == "Eine Frau läuft, schnell. de1 de6 de11 de16 de21"
    assert split.second[0].startswith('said "so", ')
    assert sorted(split.labels.tolist()) == sorted([0.0, 1.0, 2.0, 3.0, 4.0, 5.0] * 4)
    assert set(data.files) == set(find("STS-B-de").paths) == {GERMAN, GERMAN.replace("test", "dev")}


def test_empty_sentences_and_lines_within_a_cell_are_read(tmp_path):
    write_translations(tmp_path, languages=("de",))
    write(tmp_path, GERMAN, '"two\nlines"," ",1\n"a  b","\u3000c",5\n')
    data = load(find("STS-B-de"), tmp_path)
    assert data.splits["test"].first == ("two\nlines", "a  b")
    assert data.splits["test"].second == (".", "\u3000c")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"a","b",1\n"a","b"\n', ("stsb-de-test.csv", "line 2", "`sentence,sentence,score`", "2 cells")),
        ("a,b,c,1\n", ("line 1", "4 cells")),
        ("a,b,1\n\nc,d,2\n", ("line 2", "0 cells")),
        ("a,b,1\nc,d,5.1\n", ("line 2", "score 5.1", "0..5")),
        ("a,b,nan\n", ("score nan", "0..5")),
        ("a,b,good\n", "could not convert"),
        ('a,b,1\n"c,d,2\n', ("line 2", "end of data")),
        ('a,b,1\n"c"x,d,2\n', ("line 2", "expected after")),
        ("a,b," + "1" * 200_000, "stsb-de-test.csv"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, text, said):
    write_translations(tmp_path, languages=("de",))
    write(tmp_path, GERMAN, text)
    with pytest.raises(DataError, match=all_of(said)):
        load(find("STS-B-de"), tmp_path)


@pytest.fixture(scope="module")
def scored(translations, tmp_path_factory):
    output = tmp_path_factory.mktemp("scores")
    given = ["evaluate", "hashed-words:32", "--data", str(translations), "--output", str(output), "--allow-unchecked"]
    assert main([*given, "--tasks", "stsb-multi", "--protocol", "both"]) == 0
    return output


def test_the_score_is_spearman_of_cosine_over_all_pairs(translations, scored):
    told = json.loads((scored / "scores.json").read_text())["encoders"][0]["protocols"]
    encoder = load_encoder("hashed-words:32")
    for language in ("ru", "zh"):
        name = f"STSBenchmark-{language}"
        scores = told["simcse"]["results"][name]["scores"]
        assert scores == told["senteval"]["results"][name]["scores"]
        for split, key in (("test", "spearman"), ("dev", "devspearman")):
            rows = load(find(name), translations).splits[split]
            values = cosines(encoder.encode(rows.first), encoder.encode(rows.second))
            assert scores[key] == float(spearmanr(values, rows.labels).statistic)
            assert scores[key] > 0.5
    assert told["senteval"]["results"]["STSBenchmark-zh"]["num_rows"] == 24


def test_the_average_is_of_ten_languages(scored):
    told = json.loads((scored / "scores.json").read_text())
    for protocol in told["encoders"][0]["protocols"].values():
        (average,) = [one for one in protocol["averages"] if one["name"] == "STS-B in 10 languages"]
        values = [protocol["results"][name]["headline"] for name in STSB_MULTI]
        assert average["value"] == pytest.approx(sum(values) / 10)
        assert average["marked"] == list(STSB_MULTI)
        assert all(one["value"] is None for one in protocol["averages"] if one is not average)


def test_the_papers_numbers_are_next_to_validation_pairs(scored):
    told = json.loads((scored / "scores.json").read_text())
    tables = {block["name"]: block for block in told["tables"]}
    assert set(tables) == {"languages-test", "languages-dev"}
    assert tables["languages-test"]["columns"] == [*LANGUAGES, "mean"]
    assert not any(row["source"] for row in tables["languages-test"]["rows"])
    rows = {row["label"]: row for row in tables["languages-dev"]["rows"]}
    paper = rows["VisualCSE-BERT-base of the language"]["cells"]
    assert [cell["value"] for cell in paper] == pytest.approx(
        [69.87, None, None, 72.52, None, None, None, None, 77.48, 70.05, None]
    )
    assert "table 5; validation pairs of STS-B; copied" in (scored / "scores.md").read_text()


def test_one_language_has_no_average(translations, tmp_path, capsys):
    given = ["evaluate", "hashed-words:8", "--data", str(translations), "--output", str(tmp_path), "--allow-unchecked"]
    assert main([*given, "--tasks", "STS-B-pl"]) == 0
    assert "| pl |" in capsys.readouterr().out
    told = json.loads((tmp_path / "scores.json").read_text())["encoders"][0]["protocols"]["senteval"]
    assert told["averages"][-1]["value"] is None
    assert "STSBenchmark-de" in told["averages"][-1]["missing"]


def test_download_fetches_the_chosen_tasks_alone(tmp_path):
    with file_server({}) as nothing:
        for names, number in ((STSB_MULTI, 20), ([task.name for task in TASKS], 82)):
            fetched = download(tmp_path / "nothing", names, nothing.address)
            assert len(fetched) == number
            assert {file.path.startswith(TRANSLATED) for file in fetched} == {names is STSB_MULTI}
