"""Inputs that were replaced between a kill and the restart are found; a new time alone is no change."""

import gzip
import json
import os
import random
import tarfile
from io import BytesIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from messages import all_of, says

from declutr.pipeline.job.output import plan_of, write_plan
from declutr.pipeline.job.recheck import content_problems
from declutr.pipeline.job.unit_writer import sidecar_path
from declutr.pipeline.job.units import plan_units, with_file_states
from declutr.pipeline.job.worker import write_unit
from declutr.pipeline.prepare import main, problems
from declutr.pipeline.readers.input_state import digest_parts
from declutr.pipeline.shards.manifest import MANIFEST

CHANGED = "1 of {} units changed although names and sizes are the same, the first at corpus"


def texts():
    draw = random.Random(0)
    return [" ".join("".join(draw.choices("etaoinshrdlu", k=6)) for _ in range(200)) for _ in range(400)]


def write_jsonl(path):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))


def write_gz(path):
    path.write_bytes(gzip.compress("\n".join(texts()).encode(), 0, mtime=0))


def write_parquet(path):
    pq.write_table(pa.table({"text": texts()}), path, row_group_size=100, compression="none", use_dictionary=False)


def write_tar(path):
    with tarfile.open(path, "w") as archive:
        for number, text in enumerate(texts()):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = len(text)
            archive.addfile(member, BytesIO(text.encode()))


FORMS = {
    "corpus.jsonl": write_jsonl,
    "corpus.txt.gz": write_gz,
    "corpus.parquet": write_parquet,
    "corpus.tar": write_tar,
}


@pytest.fixture
def begun(tmp_path, make_config, output):
    """Makes a corpus of 550 kB and a folder in which its first units are finished, as a kill leaves it."""
    folder, tokenizer = output

    def begin(name="corpus.jsonl", num_finished=2):
        path = tmp_path / name
        FORMS[name](path)
        os.utime(path, (1_700_000_000, 1_700_000_000))
        config = make_config(path, unit_mib=0.1)
        units = look(config)
        write_plan(folder, plan_of(config, units))
        for unit in units[:num_finished]:
            write_unit(unit, folder, config, tokenizer)
        return path, config, folder

    return begin


def look(config):
    units, found = plan_units(config.corpus, config.unit_mib)
    assert not found
    return with_file_states(units)


def put(path, place, keep_time=False):
    """Replaces a few bytes of a file by others."""
    times = path.stat()
    raw = bytearray(path.read_bytes())
    raw[place : place + 3] = b"xyz"
    path.with_suffix(".new").write_bytes(raw)
    path.with_suffix(".new").replace(path)
    if keep_time:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def check(config, folder, **options):
    return content_problems(folder, config, look(config), **options)


@pytest.mark.parametrize("name", FORMS)
def test_a_file_of_the_same_size_that_was_replaced_is_found(begun, name):
    """The bytes that changed lie in what finished units read, outside of the head, the middle and the tail."""
    path, config, folder = begun(name)
    assert check(config, folder) == []
    put(path, 71_000)
    (problem,) = check(config, folder)
    says(problem, "units changed", path.name)
    assert problems(config) == [problem]


@pytest.mark.parametrize("keep_time", [False, True])
@pytest.mark.parametrize("where", ["head", "middle", "tail"])
def test_other_heads_middles_and_tails_are_found_whatever_the_time(begun, where, keep_time):
    path, config, folder = begun(num_finished=0)
    place = {"head": 20, "middle": path.stat().st_size // 2, "tail": path.stat().st_size - 20}[where]
    put(path, place, keep_time)
    assert check(config, folder)


@pytest.mark.parametrize("name", FORMS)
def test_a_new_time_alone_is_no_change(begun, name, log):
    path, config, folder = begun(name)
    path.touch()
    assert check(config, folder) == []
    says(log, "times differ", "bytes")
    (folder / MANIFEST).touch()
    assert check(config, folder) == []


def test_every_byte_is_compared_when_asked_for(begun, log):
    path, config, folder = begun()
    assert check(config, folder, verify=True) == []
    says(log, "2 of 6 units")
    put(path, 71_000, keep_time=True)
    assert check(config, folder) == []
    (problem,) = check(config, folder, verify=True)
    assert CHANGED.format(6) in problem


def test_the_command_says_so_before_any_work(begun, tmp_path, capsys):
    path, config, _ = begun()
    put(path, 71_000, keep_time=True)
    given = tmp_path / "config.yaml"
    given.write_text(json.dumps({"prepare": config.model_dump(mode="json")}))
    assert main([str(given), "--verify-inputs"]) == 1
    says(capsys.readouterr().err, "restore", "another folder")


def test_a_file_that_changes_while_it_is_read_ends_the_unit(begun, output):
    path, config, folder = begun(num_finished=0)
    unit = look(config)[0]
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
