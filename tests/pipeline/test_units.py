"""Units of work: what they count, when they are done again, who owns their folder, and inputs that were replaced."""

import gzip
import json
import os
import random
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from corpora import tar, write_table
from messages import all_of, says
from preparing import write_jsonl
from volumes import small_volume

from declutr.common.errors import RunLockedError, ShardError
from declutr.common.lock import LOCK, RunLock
from declutr.inspection.describe import describe
from declutr.pipeline.config import config_hash
from declutr.pipeline.job import worker
from declutr.pipeline.job.output import HEARTBEATS, Output, Preparation, plan_of
from declutr.pipeline.job.stages import work_on
from declutr.pipeline.job.stored import open_output
from declutr.pipeline.job.units import finished_sidecar, plan_units, sidecar_path, with_file_states, write_sidecar
from declutr.pipeline.job.worker import splits_of, write_unit
from declutr.pipeline.prepare import _complete, main, plan_ahead, prepare, problems
from declutr.pipeline.readers.corpus import ReadFailure, document_id
from declutr.pipeline.readers.input_state import digest_parts
from declutr.pipeline.shards.manifest import MANIFEST, MAX_EXAMPLES, Sidecar, build_manifest, examples_of
from declutr.pipeline.shards.shards import ShardSet


@pytest.fixture
def corpus(tmp_path):
    texts = [" ".join(f"word{number} {i}" for i in range(30)) for number in range(40)]
    rows = [{"text": text} for text in [*texts, "short", " ", texts[0].replace(" ", "\n")]]
    return write_jsonl(tmp_path / "corpus.jsonl", *rows, b'"\xff"')


def test_a_file_with_many_failures_leaves_room_for_examples_of_others():
    flood = [failed_record("a", number) for number in range(MAX_EXAMPLES)]
    sidecars = [Sidecar.model_construct(failures=rows) for rows in (flood, [failed_record("b", 7)])]
    examples = examples_of(sidecars)
    assert [(failure.source, failure.offset) for failure in examples[:3]] == [("a", 0), ("b", 7), ("a", 1)]
    assert len(examples) == MAX_EXAMPLES


def failed_record(source, offset):
    return ReadFailure(reason="invalid_json", source=source, offset=offset, message="no JSON")


def test_a_unit_accounts_for_every_document_and_can_be_read(corpus, make_config, output, tokenizer, monkeypatch):
    folder, info = output
    config = make_config(corpus)
    (unit,), _ = plan_units(config.corpus, config.unit_mib)
    assert finished_sidecar(unit, folder, config_hash(config)) is None
    monkeypatch.setattr(worker, "BEAT_SECONDS", 0)
    (folder / HEARTBEATS).mkdir()
    sidecar = write_unit(unit, folder, config, info, beats=folder / HEARTBEATS)
    assert json.loads((folder / HEARTBEATS / unit.name).read_text()) == [unit.num_bytes, 44, 41]
    counts, dropped = sidecar.counts, {"empty": 1, "too_short": 1}
    assert (counts.read, counts.kept, counts.failed, counts.dropped) == (44, 41, {"invalid_utf8": 1}, dropped)
    assert [(failure.source, failure.reason) for failure in sidecar.failures] == [("corpus.jsonl", "invalid_utf8")]
    assert {shard.split for shard in sidecar.shards} == {"train", "held-out"}
    assert sum(shard.num_documents for shard in sidecar.shards) == 41
    assert finished_sidecar(unit, folder, config_hash(config)) == sidecar
    (folder / MANIFEST).write_text(build_manifest([sidecar], info, config.geometry, {}, "").model_dump_json())
    says("\n".join(describe(folder, 0)), "1 failed: 1 invalid_utf8")
    splits = [ShardSet(folder, split) for split in ("train", "held-out")]
    rows = [row for split in splits for row in split.take(np.arange(split.num_documents)).to_pylist()]
    assert list(rows[0]) == ["id", "tokens", "windows", "num_tokens", "source", "offset"]
    same = [row for row in rows if tokenizer.decode(row["tokens"]) == " " + " ".join(f"word0 {i}" for i in range(30))]
    normalised = document_id(" ".join(f"word0 {i}" for i in range(30)).encode())
    assert [row["id"] for row in same] == [normalised] * 2, "the same words in other whitespace"
    assert 0 in [row["offset"] for row in same]


def test_a_unit_is_redone_when_its_shard_settings_or_input_are_not_the_same(corpus, make_config, output):
    folder, tokenizer = output
    config = make_config(corpus)
    (unit,), _ = plan_units(config.corpus, config.unit_mib)
    sidecar = write_unit(unit, folder, config, tokenizer)
    assert finished_sidecar(unit, folder, config_hash(make_config(corpus, seed=1))) is None
    damaged = folder / sidecar.shards[0].name
    whole, later = damaged.read_bytes(), sidecar_path(folder, unit.name).stat().st_mtime_ns + 10**9
    for raw, result in ((whole[:-1] + bytes([whole[-1] ^ 1]), None), (whole, sidecar)):  # `whole` as if it was copied
        damaged.write_bytes(raw)
        os.utime(damaged, ns=(later, later))
        assert finished_sidecar(unit, folder, config_hash(config)) == result
    with corpus.open("ab") as stream:
        stream.write(b"\n{}")
    (longer,), _ = plan_units(config.corpus, config.unit_mib)
    assert finished_sidecar(longer, folder, config_hash(config)) is None
    damaged.write_bytes(whole[:-1])
    assert finished_sidecar(unit, folder, config_hash(config)) is None


def stored_in(folder, tmp_path):
    return {"output": f"file://{folder}", "cache": str(tmp_path / "cache"), "session": {"num_cpus": 1}}


def test_a_stored_unit_is_redone_when_its_sidecar_does_not_name_its_other_files(corpus, tmp_path, make_config, output):
    config = make_config(corpus, **stored_in(output[0], tmp_path))
    (unit,), _ = plan_units(config.corpus, config.unit_mib)
    sidecar = write_unit(unit, output[0], config, output[1])
    for others in ({}, None):
        write_sidecar(output[0], sidecar.model_copy(update={"others": others}))
        with open_output(config) as place:
            assert bool(place.finished_sidecar(unit, "prepare", config_hash(config))) == (others == {})


def test_a_host_without_the_output_or_an_input_names_the_setting(corpus, make_config, output):
    config, folder = make_config(corpus), output[0]
    write = partial(write_unit, config=config, tokenizer=output[1])
    row = {"unit": look(config)[0].model_dump_json()}
    says(work_on(row, str(folder / "none"), write, True)["problem"], folder / "none", "not on host", "in output")
    (folder / "plan.json").touch()
    assert not work_on(row, str(folder), write, True)["problem"]
    corpus.unlink()
    says(work_on(row, str(folder), write, True)["problem"], corpus, "not on host", "in corpus.paths")


@pytest.mark.parametrize("stored", [False, True])
def test_an_output_that_cannot_be_removed_whole_keeps_its_plan(corpus, tmp_path, make_config, output, stored):
    folder, _ = output
    config = make_config(corpus, storage_retry_seconds=0, **(stored_in(folder, tmp_path) if stored else {}))
    plan, stuck = folder / "plan.json", folder / ("stuck" if stored else "duplicates.arrow")
    with open_output(config) as place:
        place.write_plan(plan_of(config, look(config)))
        (os.mkfifo if stored else os.mkdir)(stuck)  # neither is what could be removed
        with pytest.raises(OSError, match=r"stuck|duplicates"):
            place.discard()
        assert (plan.exists(), (folder / "tokenizer").exists()) == (True, stored)
        if not stored:
            stuck.rmdir()
            (folder / "candidates").symlink_to(tmp_path)  # which is no folder to remove
            place.discard()
            assert plan.exists()
            (folder / "candidates").unlink()
            place.discard()
            assert not plan.exists()


def test_a_list_that_changes_while_units_are_written_ends_without_a_manifest(tmp_path, make_config, corpus, output):
    folder, tokenizer = output
    (tmp_path / "words.txt").write_text("gadzooks")
    rules = {"terminal_punctuation": False, "min_line_words": None, "min_sentences": None}
    rules |= {"bad_words": str(tmp_path / "words.txt")}
    config = make_config(corpus, filters={"c4": rules}, max_error_rate=0.1)
    units = look(config)
    job = Preparation(config, units, plan_of(config, units), output_of(config, folder))
    for unit in units:
        write_unit(unit, folder, config, tokenizer)
    (tmp_path / "words.txt").write_text("word0")
    with pytest.raises(ShardError, match=all_of("filters.c4.bad_words", str(folder), "output")):
        _complete(job)
    assert not (folder / MANIFEST).exists()
    (tmp_path / "words.txt").write_text("gadzooks")
    assert _complete(job).totals["kept"] == 41


def test_the_split_is_by_content_and_of_the_asked_size():
    ids = [document_id(b"%d" % number) for number in range(5000)]
    splits = splits_of(ids, 0, 0.2)
    assert 0.18 < splits.count("held-out") / 5000 < 0.22
    assert splits == [split for identity in ids for split in splits_of([identity], 0, 0.2)]
    assert splits != splits_of(ids, 1, 0.2)
    assert (splits_of([], 0, 0.2), set(splits_of(ids, 0, 0.0))) == ([], {"train"})


@pytest.fixture
def long_corpus(tmp_path):
    texts = [" ".join(f"word{i * n % 7}{n}" for i in range(60)) for n in range(100)]
    return write_jsonl(tmp_path / "corpus.jsonl", *({"text": text} for text in texts))


@pytest.fixture
def command(write_config, make_config, long_corpus):
    return write_config(make_config(long_corpus))


def files(folder):
    """Contents and times; the time of a lock is its holder's sign of life."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.name != LOCK and path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def test_a_second_command_is_refused_with_words_and_changes_nothing(tmp_path, command, capsys, make_config):
    (tmp_path / "out").mkdir()
    with RunLock(tmp_path / "out", print):
        before = files(tmp_path / "out")
        assert main([command]) == 1
        assert f"pid {os.getpid()}" in capsys.readouterr().err
        assert (main([command, "--plan"]), files(tmp_path / "out")) == (0, before)
        with pytest.raises(RunLockedError):
            prepare(make_config(tmp_path / "corpus.jsonl"))


def test_plan_writes_nothing_and_leaves_a_folder_at_work_as_it_is(tmp_path, make_config, long_corpus, output):
    folder, tokenizer = output
    before = files(tmp_path)
    assert plan_ahead(make_config(long_corpus, output=str(tmp_path / "new"))).documents == 100
    assert files(tmp_path) == before
    config = make_config(long_corpus, unit_mib=0.01)
    units = look(config)
    output_of(config, folder).write_plan(plan_of(config, units))
    write_unit(units[0], folder, config, tokenizer)
    (folder / ".train-00001.arrow.1.tmp").write_text("being written")
    before = files(folder)
    plan_ahead(config)
    assert files(folder) == before


@pytest.mark.parametrize("left", [0, 5_000, 9_000, 20_000])
def test_a_full_disk_is_words_and_the_same_command_continues(tmp_path, command, capsys, make_config, long_corpus, left):
    with small_volume(tmp_path / "volume", 1) as volume:
        volume.fill(leave_bytes=left)
        assert main([command, f"output={volume.path / 'out'}"]) == 1
        error = capsys.readouterr().err
        says(error, "No space left on device")
        says(error, "same command")
        assert "Traceback" not in error
        assert not [path for path in volume.path.rglob("*") if path.name.endswith(".tmp")]
        volume.drain()
        assert problems(make_config(long_corpus, output=str(volume.path / "out"))) == []


def test_a_folder_that_is_not_ours_and_a_plan_on_a_full_disk_are_words(tmp_path, command, capsys, monkeypatch):
    (tmp_path / "file").touch()
    assert main([command, f"output={tmp_path / 'file' / 'out'}"]) == 1
    assert "Traceback" not in capsys.readouterr().err
    with small_volume(tmp_path / "volume", 1) as volume:
        monkeypatch.setattr("tempfile.tempdir", str(volume.path))
        volume.fill()
        assert main([command, "--plan"]) == 1
        says(capsys.readouterr().err, "No space left on device")
        assert [path.name for path in volume.path.iterdir()] == ["ballast"]


def write_form(path):
    """400 texts as a file of 550 kB."""
    draw = random.Random(0)
    texts = [" ".join("".join(draw.choices("etaoinshrdlu", k=6)) for _ in range(200)) for _ in range(400)]
    match path.name:
        case "corpus.jsonl":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        case "corpus.txt.gz":
            path.write_bytes(gzip.compress("\n".join(texts).encode(), 0, mtime=0))
        case "corpus.tar":
            path.write_bytes(tar([(f"{number}.txt", text.encode()) for number, text in enumerate(texts)]))
        case _:
            write_table(path, pa.table({"text": texts}), 100, compression="none", use_dictionary=False)


@pytest.fixture
def begun(tmp_path, make_config, output):
    """Makes a corpus of 550 kB and a folder in which its first units are finished, as a kill leaves it."""
    folder, tokenizer = output

    def begin(name="corpus.jsonl", num_finished=2):
        path = tmp_path / name
        write_form(path)
        os.utime(path, (1_700_000_000, 1_700_000_000))
        config = make_config(path, unit_mib=0.1)
        units = look(config)
        output_of(config, folder).write_plan(plan_of(config, units))
        for unit in units[:num_finished]:
            write_unit(unit, folder, config, tokenizer)
        return path, config, folder

    return begin


def look(config):
    units, unreadable = plan_units(config.corpus, config.unit_mib)
    assert not unreadable
    return with_file_states(units)


def put(path, place, keep_time=False):
    times, raw = path.stat(), bytearray(path.read_bytes())
    raw[place : place + 3] = b"xyz"
    path.with_suffix(".new").write_bytes(raw)
    path.with_suffix(".new").replace(path)
    if keep_time:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def output_of(config, folder):
    return Output(config.output, folder, config.duplicates, config.session)


def check(config, folder, **options):
    units = look(config)
    return output_of(config, folder).input_problems(plan_of(config, units), units, **options)


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.txt.gz", "corpus.parquet", "corpus.tar"])
def test_a_new_time_is_no_change_and_other_bytes_are(begun, name, log):
    path, config, folder = begun(name)
    assert check(config, folder) == []
    path.touch()
    assert check(config, folder) == []
    says(log, "times differ", "bytes")
    (folder / MANIFEST).touch()
    assert check(config, folder) == []
    (folder / MANIFEST).unlink()
    put(path, 71_000)  # which finished units have read, outside of the head, the middle and the tail
    (problem,) = check(config, folder)
    says(problem, "units changed", path.name)
    assert problems(config) == [problem]


@pytest.mark.parametrize("keep_time", [False, True])
@pytest.mark.parametrize("where", ["head", "middle", "tail"])
def test_other_heads_middles_and_tails_are_found_whatever_the_time(begun, where, keep_time):
    path, config, folder = begun(num_finished=0)
    put(path, {"head": 20, "middle": path.stat().st_size // 2, "tail": path.stat().st_size - 20}[where], keep_time)
    assert check(config, folder)


def test_bytes_are_compared_on_request_and_a_file_that_changes_ends_its_unit(begun, log, write_config, capsys, output):
    path, config, folder = begun()
    assert check(config, folder, verify=True) == []
    says(log, "2 of 6 units")
    put(path, 71_000, keep_time=True)
    assert check(config, folder) == []
    (problem,) = check(config, folder, verify=True)
    assert "1 of 6 units changed although names and sizes are the same, the first at corpus" in problem
    assert main([write_config(config), "--verify-inputs"]) == 1
    says(capsys.readouterr().err, "restore", "another folder")
    unit = look(config)[2]
    put(path, 400_000)
    with pytest.raises(OSError, match=all_of("corpus.jsonl", "changed")):
        write_unit(unit, folder, config, output[1])
    assert not sidecar_path(folder, unit.name).exists()


@pytest.mark.parametrize("end", [b"\n", b"x"])
def test_the_end_of_a_line_beyond_a_unit_is_part_of_it(tmp_path, make_config, end):
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"a" * 1000 + end + b"b" * 1000 + b"\n" + b"c" * 1000)
    (first, _second, _third), _ = plan_units(make_config(path).corpus, 0.00097)
    before = digest_parts(first.parts)
    put(path, 1500)
    assert (digest_parts(first.parts) == before) == (end == b"\n" and first.parts[0].stop <= 1001)
    before = digest_parts(first.parts)
    put(path, 2500)
    assert digest_parts(first.parts) == before
