"""Downloads, checked as they arrive; data that are not the published ones get no score; STS-B in ten languages."""

import json
from importlib.resources import files

import pytest
from corpora import tar
from fileserver import file_server
from messages import all_of, says
from scipy.stats import spearmanr
from sentevaldata import COMPLETE, TRANSLATED, write, write_binary, write_rest, write_translations

from declutr.cli.main import main
from declutr.common.errors import DataError, RemoteError
from declutr.encoders.loading import load_encoder
from declutr.evaluation.senteval import data
from declutr.evaluation.senteval.data import download, fetch, git_sha1, inspect, load, overview, published
from declutr.evaluation.senteval.similarity import cosines
from declutr.evaluation.senteval.tasks import ALL_TASKS, LANGUAGES, MARKS, SETS, STSB_MULTI, choose_tasks, find

TEXT = b"".join(b"%06d a line\n" % number for number in range(5000))


@pytest.fixture
def server():
    with file_server({"file": TEXT}) as served:
        yield served


def test_a_broken_connection_begins_again_and_the_third_break_ends_it(server, tmp_path):
    server.break_after = [10_000, 20_000]
    fetch(f"{server.address}/file", tmp_path / "there/file")
    assert (tmp_path / "there/file").read_bytes() == TEXT
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]
    server.break_after = [1000] * 3
    with pytest.raises(RemoteError, match=all_of("1,000 of 70,000 bytes", "same command")):
        fetch(f"{server.address}/file", tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_download_of_a_wrong_size_hash_or_address_leaves_nothing(server, tmp_path, monkeypatch):
    for address, expected, facts in (
        (f"{server.address}/nowhere", "", "404"),
        (f"{server.address}/file", "0000", ("SHA-1", "published file has 0000")),
        ("file:///etc/passwd", "", ("file:///etc/passwd", "http://")),
    ):
        with pytest.raises(RemoteError, match=all_of(facts)):
            fetch(address, tmp_path / "file", expected)
    assert not list(tmp_path.iterdir())
    path = "probing/past_present.txt"
    server.files[path] = TEXT
    (failed,) = download(tmp_path, ["Tense"], server.address)
    says(failed.note, "SHA-1", data.known_hashes()[path])
    assert not (tmp_path / path).exists()
    (tmp_path / "right").write_bytes(TEXT)
    fetch(f"{server.address}/file", tmp_path / "file", git_sha1(tmp_path / "right"))
    assert (tmp_path / "file").read_bytes() == TEXT
    monkeypatch.setitem(data.known_hashes(), path, git_sha1(tmp_path / "right"))
    assert [download(tmp_path, ["Tense"], server.address)[0].outcome for _ in range(2)] == ["fetched", "kept"]
    monkeypatch.setattr(data, "_MAX_BYTES", len(TEXT) - 1)
    with pytest.raises(RemoteError, match="69,999"):
        fetch(f"{server.address}/file", tmp_path / "other")


def test_an_archive_is_read_as_a_stream_and_only_what_is_wanted_is_written(server, tmp_path):
    members = [
        ("../../escaped", b"x"), ("/absolute", b"x"), ("./deep/er/CR/custrev.pos", b"good\n"),
        ("CR/custrev.pos.bak", b"x"), ("xCR/custrev.neg", b"x"), ("MR/rt-polarity.neg", "SYMTYPE"),
        ("SUBJ/subj.objective", b"objective\n"),
    ]  # fmt: skip
    folder, names = tmp_path / "data", ["CR", "MR", "SUBJ"]
    write(folder, "downstream/SUBJ/subj.objective", "mine\n")
    server.files["senteval.tar"] = tar(members)[:1500]  # broken: fetched again the next time
    assert {file.outcome for file in download(folder, names, server.address)} == {"kept", "failed"}
    server.files["senteval.tar"] = tar(members)
    outcomes = {file.path: file for file in download(folder, names, f"{server.address}/")}
    says(outcomes["downstream/CR/custrev.pos"].note, "copy", "known hash")
    says(outcomes["downstream/MR/rt-polarity.neg"].note, "not", "senteval.tar")
    assert outcomes["downstream/SUBJ/subj.objective"].outcome == "kept"
    contents = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert contents == {"data/downstream/CR/custrev.pos": b"good\n", "data/downstream/SUBJ/subj.objective": b"mine\n"}
    shown = "\n".join(data.transfers(tuple(outcomes.values()), names))
    says(shown, "failed", "downstream/MR/rt-polarity.neg", "senteval.tar")


def test_download_command_counts_and_names_what_failed(server, tmp_path, capsys):
    server.files["senteval.tar"] = tar([("SUBJ/subj.objective", b"an objective line\n")])
    assert main(["evaluate", "--download", str(tmp_path), "--mirror", server.address]) == 1
    said = capsys.readouterr().out
    says(said, "1 fetched", "0 already present", "81 failed")
    assert "404" in said
    says(said, "ImageCaptionRetrieval", "pickles")
    assert "no subj.subjective" in said
    (tmp_path / "empty").mkdir()
    assert main(["evaluate", "--data", str(tmp_path / "empty")]) == 1
    said = capsys.readouterr()
    says(said.err, "--data", "empty: has neither downstream/ nor probing/", "--download")
    assert not said.out
    (tmp_path / "empty" / "downstream").mkdir()
    assert main(["evaluate", "--data", str(tmp_path / "empty")]) == 1
    assert "28 missing" in capsys.readouterr().out
    chosen = download(tmp_path / "nothing", STSB_MULTI, server.address)
    assert len(chosen) == 20
    assert all(file.path.startswith(TRANSLATED) for file in chosen)


def test_every_task_has_published_figures_and_a_hash_of_each_file():
    assert set(published()) == {task.name for task in ALL_TASKS}
    bases = json.loads(files("declutr.evaluation.senteval").joinpath("published.json").read_bytes())["basis"]
    for name, figures in published().items():
        assert figures["basis"] in bases
        assert set(figures["files"]) == (set() if name == "ImageCaptionRetrieval" else set(find(name).paths))
    scored = {year: sum(published()[f"STS{year}"]["rows"].values()) for year in range(12, 17)}
    assert scored == {12: 3108, 13: 1500, 14: 3750, 15: 3000, 16: 1186}  # the task papers' numbers, STS13 without SMT
    assert all(published()[name]["rows"] == {"dev": 1500, "test": 1379} for name in STSB_MULTI)
    paths = {path for task in ALL_TASKS if task.name not in data.sources()["gone"] for path in task.paths}
    assert data.sources()["files"].keys() < paths <= data.known_hashes().keys()
    assert data.sources()["gone"].keys() == {"SNLI", "ImageCaptionRetrieval"}
    addresses = [*data.sources()["files"].values(), data.sources()["archive"]["url"]]
    assert all(address.startswith("https://") for address in addresses)
    assert len(STSB_MULTI) == len(LANGUAGES) == 10
    assert [task.name for task in ALL_TASKS[28:]] == list(STSB_MULTI)
    assert choose_tasks(["stsb-multi", "sts-b"]) == ("STSBenchmark", *STSB_MULTI)
    assert choose_tasks(["STS-B-zh", "stsbenchmark-de"]) == ("STSBenchmark-de", "STSBenchmark-zh")
    assert [name for name in SETS if set(SETS[name]) & set(STSB_MULTI)] == ["stsb-multi"]


@pytest.mark.parametrize(("task", "ones", "zeros", "rows"), [
    ("SUBJ", 5000, 5000, ()),  # other sentences in the right number
    # princeton-nlp/SimCSE#84, facebookresearch/SentEval#63; printed as 99.60 in two papers
    ("SUBJ", 5000, 20, ("SUBJ: 5,020 rows", "published 10,000")), ("MR", 50, 24, ("MR: 74 rows", "published 10,662")),
])  # fmt: skip
def test_other_data_are_refused_and_scored_with_a_mark_when_asked(tmp_path, task, ones, zeros, rows):
    good, bad = [f"good number {n} ." for n in range(ones)], [f"bad number {n} ." for n in range(zeros)]
    write_binary(tmp_path, good, bad)
    refused, allowed = (inspect(find(task), tmp_path, allow) for allow in (False, True))
    assert (refused.standing, refused.usable) == ("refused", False)
    assert (allowed.standing, allowed.usable) == ("unpublished", True)
    says(refused.reason, "2 of 2 files differ", "get them again", "--download", *rows)
    assert ("rows" in refused.reason) == bool(rows)
    says(MARKS[allowed.standing], "not the published", "comparable")
    assert allowed.findings == refused.findings
    said = "\n".join(overview([refused, allowed]))
    says(said, "1 refused", "1 unpublished")
    assert [part for part in ("REFUSED", "NOT the published", "--allow-unchecked") if part not in said] == []


def test_missing_and_half_downloaded_files_and_those_in_latin_1_are_told_apart(tmp_path):
    assert inspect(find("STS14"), tmp_path).standing == "missing"
    write(tmp_path, "downstream/STS/STS14-en-test/STS.gs.images.txt", "5\n")
    half = inspect(find("STS14"), tmp_path, allow_unchecked=True)  # what cannot be read cannot be scored
    assert half.standing == "refused"
    says(half.reason, "no STS.input.deft-forum.txt", "1 of 12 files")
    write_rest(tmp_path)
    for split in ("train", "dev", "test"):
        write(tmp_path, f"downstream/SST/binary/sentiment-{split}", "good\t1\nna\u00efve\t0\n", "latin-1")
    reason = inspect(find("SST2"), tmp_path).reason
    says(reason, "sentiment-train", "line 2", "byte 0xef", "utf-8", "latin-1 (ISO 8859-1)")
    path = tmp_path / "downstream/MRPC/msr_paraphrase_test.txt"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    says(inspect(find("MRPC"), tmp_path).reason, "MRPC test: 0 rows")


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


def test_a_sentence_is_kept_as_published(translations, tmp_path):
    german = load(find("STS-B-de"), translations)
    split = german.splits["test"]
    assert split.first[0] == "Eine Frau läuft, schnell. de1 de6 de11 de16 de21"
    assert split.second[0].startswith('said "so", ')
    assert sorted(split.labels.tolist()) == sorted([0.0, 1.0, 2.0, 3.0, 4.0, 5.0] * 4)
    assert set(german.files) == set(find("STS-B-de").paths) == {GERMAN, GERMAN.replace("test", "dev")}
    write_translations(tmp_path, languages=("de",))  # an empty sentence, and lines within a cell
    write(tmp_path, GERMAN, '"two\nlines"," ",1\n"a  b","\u3000c",5\n')
    split = load(find("STS-B-de"), tmp_path).splits["test"]
    assert (split.first, split.second) == (("two\nlines", "a  b"), (".", "\u3000c"))


@pytest.mark.parametrize(("text", "said"), [
    ('"a","b",1\n"a","b"\n', ("stsb-de-test.csv", "line 2", "`sentence,sentence,score`", "2 cells")),
    ("a,b,c,1\n", ("line 1", "4 cells")), ("a,b,1\n\nc,d,2\n", ("line 2", "0 cells")),
    ("a,b,1\nc,d,5.1\n", ("line 2", "score 5.1", "0..5")), ("a,b,nan\n", ("score nan", "0..5")),
    ("a,b,good\n", "could not convert"), ('a,b,1\n"c,d,2\n', ("line 2", "end of data")),
    ('a,b,1\n"c"x,d,2\n', ("line 2", "expected after")), ("a,b," + "1" * 200_000, "stsb-de-test.csv"),
])  # fmt: skip
def test_a_broken_file_is_named_with_its_line(tmp_path, text, said):
    write_translations(tmp_path, languages=("de",))
    write(tmp_path, GERMAN, text)
    with pytest.raises(DataError, match=all_of(said)):
        load(find("STS-B-de"), tmp_path)


def evaluated(translations, output, *options):
    words = ["--data", str(translations), "--output", str(output), "--allow-unchecked", *options]
    assert main(["evaluate", "hashed-words:32", *words]) == 0
    return json.loads((output / "scores.json").read_text())


@pytest.fixture(scope="module")
def scored(translations, tmp_path_factory):
    output = tmp_path_factory.mktemp("scores")
    scores = evaluated(translations, output, "--tasks", "stsb-multi", "--protocol", "both")
    return scores | {"text": (output / "scores.md").read_text()}


def test_the_score_is_spearman_of_cosine_over_all_pairs_and_the_average_is_of_ten_languages(translations, scored):
    protocols = scored["encoders"][0]["protocols"]
    encoder = load_encoder("hashed-words:32")
    for language in ("ru", "zh"):
        name = f"STSBenchmark-{language}"
        scores = protocols["simcse"]["results"][name]["scores"]
        assert scores == protocols["senteval"]["results"][name]["scores"]
        for split, key in (("test", "spearman"), ("dev", "devspearman")):
            rows = load(find(name), translations).splits[split]
            values = cosines(encoder.encode(rows.first), encoder.encode(rows.second))
            assert scores[key] == float(spearmanr(values, rows.labels).statistic)
            assert scores[key] > 0.5
    assert protocols["senteval"]["results"]["STSBenchmark-zh"]["num_rows"] == 24
    for protocol in protocols.values():
        (average,) = [row for row in protocol["averages"] if row["name"] == "STS-B in 10 languages"]
        values = [protocol["results"][name]["headline"] for name in STSB_MULTI]
        assert average["value"] == pytest.approx(sum(values) / 10)
        assert average["marked"] == list(STSB_MULTI)
        assert all(row["value"] is None for row in protocol["averages"] if row is not average)


def test_the_papers_numbers_are_next_to_validation_pairs(scored):
    tables = {block["name"]: block for block in scored["tables"]}
    assert set(tables) == {"languages-test", "languages-dev"}
    assert tables["languages-test"]["columns"] == [*LANGUAGES, "mean"]
    assert not any(row["source"] for row in tables["languages-test"]["rows"])
    rows = {row["label"]: row for row in tables["languages-dev"]["rows"]}
    paper = [cell["value"] for cell in rows["VisualCSE-BERT-base of the language"]["cells"]]
    assert paper == pytest.approx([69.87, None, None, 72.52, None, None, None, None, 77.48, 70.05, None])
    assert "table 5; validation pairs of STS-B; copied" in scored["text"]


def test_one_language_has_no_average(translations, tmp_path, capsys):
    scores = evaluated(translations, tmp_path, "--tasks", "STS-B-pl")
    assert "| pl |" in capsys.readouterr().out
    average = scores["encoders"][0]["protocols"]["senteval"]["averages"][-1]
    assert average["value"] is None
    assert "STSBenchmark-de" in average["missing"]
