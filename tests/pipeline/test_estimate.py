"""What `--plan` says of a folder in which small files hold most of the documents, however little time it has."""

import gzip
import json
import random

import pytest
from corpora import write_records
from mediafiles import spread
from messages import says

from declutr.pipeline.job import estimate as estimating
from declutr.pipeline.job.estimate import Sample, draw_samples, makespan, read_for
from declutr.pipeline.job.units import UnitReader, plan_units
from declutr.pipeline.prepare import main, plan_ahead


@pytest.fixture
def mixed(tmp_path):
    """Novels with a line each, 10,000 posts in one compressed file, 150 logs of seven lines, long papers."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(2000)]

    def text(number):
        return " ".join(draw.choices(words, k=number))

    def rows(count, low, high):
        return "".join(json.dumps({"text": text(draw.randint(low, high))}) + "\n" for _ in range(count)).encode()

    files = {f"novels/{n}.txt": text(50_000).encode() for n in range(3)}
    files |= {"posts.jsonl.gz": gzip.compress(rows(10_000, 3, 12), 1), "papers.jsonl": rows(253, 200, 500)}
    logs = ["".join(text(draw.randint(3, 9)) + "\n" for _ in range(7)).encode() for _ in range(150)]
    return spread(tmp_path / "mixed", files | {f"logs/{n}.txt": log for n, log in enumerate(logs)})


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 20.0])
def test_a_mixed_folder_is_estimated_by_format_and_size(mixed, make_config, monkeypatch, seconds):
    monkeypatch.setattr(estimating, "_SAMPLE_SECONDS", seconds)
    config = make_config(mixed, geometry={"num_anchors": 2, "max_tokens": 128})
    estimate, truth = plan_ahead(config), 10_000 + 253 + 3 + 7 * 150
    assert (estimate.documents, estimate.kept) == (pytest.approx(truth, rel=0.15), pytest.approx(256, rel=0.15))
    assert any("documents   about " in line for line in estimate.lines)


def test_a_short_file_does_not_stand_for_hundreds(tmp_path, make_config):
    draw, root = random.Random(0), tmp_path / "notes"
    root.mkdir()
    for number in range(1000):
        words = draw.randint(3, 20) if number % 20 == 0 else round(draw.lognormvariate(7, 0.8)) + 150
        (root / f"{number}.md").write_text("one two three four " * (words // 4 + 1))
    estimate = plan_ahead(make_config(root, geometry={"num_anchors": 1, "max_tokens": 64}))
    assert (estimate.documents, estimate.kept) == (pytest.approx(1000, rel=0.1), pytest.approx(950, rel=0.1))


SHORT = "one two three\n" * 50, ["none of 50 documents;the longest", "50 too_short", "50 of 50 documents;too short"]
UNREADABLE = "\xff\n" * 50, ["no document;all 50 failed;50 invalid_utf8", "50 invalid_utf8;max_error_rate = 0.01"]


@pytest.mark.parametrize(("text", "reasons"), [SHORT, UNREADABLE, ("one two three " * 400 + "\n", [])])
def test_a_sample_of_which_nothing_is_kept_says_why(tmp_path, make_config, caplog, text, reasons):
    (tmp_path / "a.txt").write_bytes(text.encode("latin-1"))
    lines = plan_ahead(make_config(tmp_path / "a.txt", geometry={"num_anchors": 1, "max_tokens": 64})).lines
    assert not any("about" in line for line in lines[:2]), "the corpus was read whole"
    assert any(" s on " in line for line in lines)
    assert not any(line.startswith("  measured") for line in lines), "no CPUs were asked for"
    warnings = [record.getMessage() for record in caplog.records if record.getMessage().startswith("in the sample: ")]
    shown_lines = [line for line in lines if line.startswith(("  not kept", "  hint"))]
    for line, words in zip(warnings + shown_lines, reasons, strict=True):
        says(line, words.split(";"))
    assert not reasons[2:] or lines[-1].endswith("corpus.format=auto_text_file")


def test_samples_are_bounded_and_stand_for_every_byte(tmp_path, make_config):
    for number in range(600):
        (tmp_path / "in" / str(number)).mkdir(parents=True)
        (tmp_path / "in" / str(number) / "a.txt").write_text("one two\n" * (number + 1))
    units, _ = plan_units(make_config(tmp_path / "in").corpus, 1.0)
    samples = draw_samples([part for unit in units for part in unit.parts])
    assert 64 <= len(samples) < 100
    assert sum(sample.stands_for for sample in samples) == sum(unit.num_bytes for unit in units)
    for sample in samples:
        sizes = [part.num_bytes for part in sample.parts]
        assert max(sizes) < 4 * min(sizes)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.arrow", "a.dictionary.parquet"])
def test_the_bytes_of_a_beginning_are_those_of_its_records(tmp_path, make_config, name):
    """Readers take a MiB or a batch at a time: what they consumed says little of the first records they give."""
    rows = [{"text": f"{number:05d} some words " * 12} for number in range(30_000)]
    if "json" in name:
        raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (tmp_path / name).write_bytes(gzip.compress(raw, 0) if name.endswith("gz") else raw)
    else:
        write_records(tmp_path / name, rows, 1_000 if name.endswith("arrow") else 10_000)
    config = make_config(tmp_path / name)
    (unit,), _ = plan_units(config.corpus, 32.0)
    for seconds, whole in ((0.0, False), (60.0, True)):
        sample = Sample(unit.parts)
        number = sum(1 for _ in read_for(seconds, UnitReader(unit, config.corpus), sample, []))
        assert (number == 30_000, sample.num_bytes == unit.num_bytes) == (whole, whole)
        assert number * unit.num_bytes / 30_000 == pytest.approx(sample.num_bytes, rel=0.05)


def test_units_are_not_divided_among_cpus():
    assert [makespan([3.0, 2.0, 4.0, 3.0], num_cpus) for num_cpus in (1, 2, 128)] == [12.0, 6.0, 4.0]
    assert (makespan([1.0] * 10, 8), makespan([], 8)) == (2.0, 0.0), "a second round, and no unit"


def test_a_plan_for_other_cpus_names_what_was_measured_and_its_limits(tmp_path, write_config, make_config, capsys):
    line = "one two three four " * 300 + "\n"
    (tmp_path / "in").mkdir()
    for name, number in (("a", 20), ("large", 600), ("z", 20)):
        (tmp_path / "in" / f"{name}.txt.gz").write_bytes(gzip.compress((line * number).encode(), 0))
    for exact in (True, False):
        config = make_config(tmp_path / "in", unit_mib=0.1, duplicates={"exact": exact})
        assert main([write_config(config), "--plan", "--cpus", "64"]) == 0
        shown = capsys.readouterr().out
        says(shown, " s on 64 CPUs")
        says(shown, "on 1 of", "this machine", "estimated for 64 CPUs of the same speed")
        says(shown, "units       3", "large.txt.gz", "beyond about 2 do not")  # one unit is most of the corpus
        assert ("search for duplicates" in shown) == exact
    # CPUs without a plan or below one are refused.
    (tmp_path / "a.txt").write_text("one two three " * 400 + "\n")
    path = write_config(make_config(tmp_path / "a.txt"))
    for options, reason in ((["--cpus", "4"], "needs --plan"), (["--plan", "--cpus", "0"], "at least 1")):
        with pytest.raises(SystemExit) as stopped:
            main([path, *options])
        assert stopped.value.code == 2
        says(capsys.readouterr().err, f"--cpus {options[-1]}", reason)
    assert not (tmp_path / "out").exists()
