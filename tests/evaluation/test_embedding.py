"""`declutr embed`: sentence-transformers' vectors from any input, whole or not at all, on full disks, after kills."""

import fcntl
import gzip
import json
import os
import signal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import TEXTS, jsonl
from messages import all_of, says
from processes import run_python
from sentence_transformers import SentenceTransformer
from volumes import small_volume

import declutr
from declutr.cli.main import main
from declutr.common.errors import UsageError
from declutr.embedding.build import index as build_index
from declutr.embedding.index import SearchIndex
from declutr.embedding.job import UnitEmbedder
from declutr.embedding.note import read_note
from declutr.embedding.units import EmbedConfig, plan
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import vectors_fingerprint

LINES = [text.replace("\n", " ") for text in TEXTS]


@pytest.fixture(scope="module")
def expected(model):
    return SentenceTransformer(model, device="cpu").encode(LINES)


def rows_of(texts):
    return [{"key": f"k{number}", "sentence": text} for number, text in enumerate(texts)]


def write_inputs(folder):
    rows, half = rows_of(LINES), len(LINES) // 2
    (folder / "in.txt").write_text("\n".join(LINES) + "\n")
    (folder / "in.jsonl.gz").write_bytes(gzip.compress(jsonl(folder / "in.jsonl", rows).read_bytes()))
    pq.write_table(pa.Table.from_pylist(rows), folder / "in.parquet", row_group_size=20)
    (folder / "several").mkdir()
    pq.write_table(pa.Table.from_pylist(rows[half:]), folder / "several/b.parquet")
    jsonl(folder / "several/a.jsonl", rows[:half])


def embed(model, source, output, *more):
    return main(["embed", model, str(source), "--output", str(output), "--text-field", "sentence", *map(str, more)])


def vectors(path):
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False)
    return np.stack(pq.read_table(path).column("embedding").to_numpy())


@pytest.mark.slow
@pytest.mark.parametrize("source", ["in.txt", "in.jsonl.gz", "in.parquet", "several"])
def test_every_input_gives_what_sentence_transformers_gives_and_rows_carry_their_ids(model, expected, tmp_path, source):
    write_inputs(tmp_path)
    ids = [] if source == "in.txt" else ["--id-field", "key"]
    for name, more in (("out.npy", []), ("out.parquet", ids)):
        assert embed(model, tmp_path / source, tmp_path / name, "--unit-mib", 0.0005, *more) == 0
        np.testing.assert_allclose(vectors(tmp_path / name), expected, atol=1e-5, rtol=0)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column("row").to_pylist() == list(range(len(LINES)))
    assert not ids or table.column("id").to_pylist() == [row["key"] for row in rows_of(LINES)]
    names = {path.name for path in tmp_path.iterdir() if "out" in path.name}
    assert names == {"out.npy", "out.npy.json", "out.parquet", "out.parquet.json"}
    assert not ids or embed(model, tmp_path / source, tmp_path / "out.npy", *ids) == 1


@pytest.mark.parametrize(("order", "names"), [(["b.txt", "a*"], "b a1 a2"), (["a2.txt", "a*", "b.txt"], "a2 a1 b")])
def test_rows_follow_the_inputs_as_they_are_named_and_only_a_glob_is_sorted(tmp_path, order, names):
    for name in ("b", "a2", "a1"):
        (tmp_path / f"{name}.txt").write_text(f"{name} one\n{name} two\n")
    texts = [f"{name} {number}" for name in names.split() for number in ("one", "two")]
    for output in ("out.npy", "out.parquet"):
        declutr.embed("hashed-words:32", [tmp_path / name for name in order], tmp_path / output, unit_mib=1e-5)
        np.testing.assert_array_equal(vectors(tmp_path / output), load_encoder("hashed-words:32").encode(texts))
        build_index(tmp_path / output, tmp_path / f"{output}-index")
        assert [text.text for text in SearchIndex(tmp_path / f"{output}-index").texts(range(6))] == texts


@pytest.mark.parametrize("unit_mib", [None, 0.004])
def test_only_what_changed_is_embedded_again(model, tmp_path, caplog, unit_mib):
    caplog.set_level("INFO", "declutr")
    folder, output, fresh = tmp_path / "in", tmp_path / "o.parquet", tmp_path / "fresh.parquet"
    folder.mkdir()

    def write(name, *texts):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))

    def embedded(path, inputs):
        caplog.clear()
        return declutr.embed(model, inputs, path, passages=True, skip_bad=True, unit_mib=unit_mib)

    for name in "bcdefg":
        write(name, *(f"{name} {LINES[number]} " * number for number in range(4)))
    (folder / "f.jsonl").write_bytes((folder / "f.jsonl").read_bytes() + b'{"text": 1}\n')
    embedded(output, folder)
    write("a", "first, and new")
    write("d", *LINES[:5])
    (folder / "c.jsonl").unlink()
    note = embedded(output, folder)
    says(caplog.messages, "reusing 4 of 6 pieces of the inputs")
    whole = embedded(fresh, folder)
    assert note.model_dump(exclude={"config", "num_bytes"}) == whole.model_dump(exclude={"config", "num_bytes"})
    tables = [pq.read_table(path) for path in (output, fresh)]
    assert tables[0].drop(["embedding"]) == tables[1].drop(["embedding"])
    np.testing.assert_allclose(vectors(output), vectors(fresh), atol=1e-6)
    build_index(output, tmp_path / "index")
    entries = [folder / f"{name}.jsonl" for name in "gfbdea"]  # in another order, nothing is embedded
    embedded(output, entries)
    says(caplog.messages, "reusing 6 of 6 pieces of the inputs")
    embedded(fresh, entries)
    assert pq.read_table(output).drop(["embedding"]) != tables[0].drop(["embedding"])
    np.testing.assert_allclose(vectors(output), vectors(fresh), atol=1e-6)


def test_a_bad_record_costs_no_embeddings_and_another_file_under_the_name_is_refused(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n{broken\n')
    inputs, output = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], tmp_path / "o.parquet"
    words = ["embed", "hashed-words:8", "--output", str(output)]
    assert main([*words, inputs[0]]) == 0
    assert main([*words, *inputs]) == 1
    says(capsys.readouterr().err, "b.jsonl at 14: invalid_json", "--skip-bad skips such records")
    assert main([*words, *inputs, "--skip-bad"]) == 0
    says(capsys.readouterr().err, "reusing 1 of 2 pieces")
    assert main([*words, *inputs]) == 1
    says(capsys.readouterr().err, "was made with skip_bad = True, not False")
    pq.write_table(pa.table({"mine": [1]}), output)
    kept = output.read_bytes()
    assert main([*words, *inputs, "--skip-bad"]) == 1
    says(capsys.readouterr().err, f"--output {output}: its note is of another file; delete both")
    assert output.read_bytes() == kept


def test_ids_are_texts_or_whole_numbers_and_a_lost_file_is_named(tmp_path, capsys):
    lines = '\ufeff{"text": "a", "id": 9007199254740993}\n{"text": "b", "id": 0, "x": NaN}\n'
    (tmp_path / "a.jsonl").write_text(lines + '{"text": "c", "id": "z"}\n{"text": "d", "id": 12}\n')
    pq.write_table(pa.table({"text": pa.array([], pa.string()), "id": pa.nulls(0)}), tmp_path / "empty.parquet")
    pq.write_table(pa.table({"text": ["e", "f"], "id": pa.array([-7, None], pa.int16())}), tmp_path / "b.parquet")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    places = [str(tmp_path / name) for name in ("a.jsonl", "empty.parquet", "b.parquet", "cut.parquet")]
    more = ["--id-field", "id", "--output", str(tmp_path / "o.parquet")]
    assert main(["embed", "hashed-words:8", *places[:3], *more]) == 1
    says(capsys.readouterr().err, f"{places[2]} at 1: no_id: the id is null. --id-field names", "--skip-bad")
    assert main(["embed", "hashed-words:8", *places, "--skip-bad", *more]) == 0
    says(capsys.readouterr().out, "lost, wholly or in part:", places[3])
    assert pq.read_table(tmp_path / "o.parquet").column("id").to_pylist() == ["9007199254740993", "0", "z", "12", "-7"]
    assert read_note(tmp_path / "o.parquet").lost == places[3:]


def test_several_columns_are_joined(tmp_path):
    (tmp_path / "in.csv").write_text("title,body\na,b c\nd,\n")
    pq.write_table(pa.table({"text": ["a\nb c", "d"]}), tmp_path / "joined.parquet")
    fields = ["--text-field", "title", "--text-field", "body"]
    for source, output, more in (("in.csv", "a.npy", fields), ("joined.parquet", "b.npy", [])):
        words = ["embed", "hashed-words:8", str(tmp_path / source), "--output", str(tmp_path / output), *more]
        assert main(words) == 0
    np.testing.assert_array_equal(vectors(tmp_path / "a.npy"), vectors(tmp_path / "b.npy"))


def test_embed_truncates_then_normalises_then_rounds(model, expected, tmp_path):
    write_inputs(tmp_path)
    shape, first = ("--dimensions", 8, "--normalise", "--dtype", "float16"), expected[:, :8]
    for output in ("out.npy", "out.parquet"):
        assert embed(model, tmp_path / "in.txt", tmp_path / output, *shape) == 0
        found = vectors(tmp_path / output)
        assert found.dtype == np.float16
        np.testing.assert_allclose(found, first / np.linalg.norm(first, axis=1, keepdims=True), atol=1e-3)
    assert embed(model, tmp_path / "in.txt", tmp_path / "out.npy", "--dimensions", 33) == 1


@pytest.mark.slow
def test_embed_of_unreadable_input_stops_or_counts_it(model, expected, tmp_path, capsys):
    rows = [json.dumps(row).encode() for row in rows_of(LINES)]
    rows[3], rows[5] = b'{"sentence": 3}', b"no json"
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join(rows) + b"\n")
    (tmp_path / "bad.txt").write_bytes(b"good\n\xff\xfe\n")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    for fact in ("bad.jsonl at ", "bad.txt at 5", "cut.parquet"):
        assert embed(model, tmp_path / fact.split()[0], tmp_path / "out.npy") == 1
        assert fact in capsys.readouterr().err
        assert not (tmp_path / "out.npy").exists()
        assert not (tmp_path / ".out.npy.parts").exists()
    assert embed(model, tmp_path / "bad.jsonl", tmp_path / "out.npy", "--skip-bad") == 1  # an .npy has only places
    assert embed(model, tmp_path / "bad.jsonl", tmp_path / "out.parquet", "--skip-bad") == 0
    says(capsys.readouterr().out, "1 invalid_json")
    kept = [number for number in range(len(LINES)) if number not in (3, 5)]
    assert pq.read_table(tmp_path / "out.parquet").column("row").to_pylist() == kept
    np.testing.assert_allclose(vectors(tmp_path / "out.parquet"), expected[kept], atol=1e-5, rtol=0)
    assert read_note(tmp_path / "out.parquet").skipped == {"invalid_json": 1, "no_text_field": 1}
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a.jsonl").write_bytes(b"\n".join(rows[:8]) + b"\n")
    (tmp_path / "two" / "b.jsonl").write_bytes(b"\n".join(rows[8:]) + b"\n")
    assert embed(model, tmp_path / "two", tmp_path / "two.parquet", "--skip-bad", "--unit-mib", 0.0001) == 0
    assert pq.read_table(tmp_path / "two.parquet").column("row").to_pylist() == kept  # skipped records are counted
    with (tmp_path / "two.parquet").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(UsageError, match=all_of("size", "note")):
        read_note(tmp_path / "two.parquet")


def test_a_job_that_is_finished_is_not_done_again_unless_something_changed(model, tmp_path):
    """The word `auto` means bf16 on a GPU, whose parts must not be joined with those of fp32 on a CPU."""
    write_inputs(tmp_path)
    output = tmp_path / "out.npy"
    jobs = []
    assert embed(model, tmp_path / "in.txt", output) == 0
    assert embed(model, tmp_path / "in.txt", output, "--precision", "bf16") == 1
    for number, precision in enumerate(("auto", "auto", "fp32", "bf16", "auto")):
        output = tmp_path / ("half.npy" if precision == "bf16" else "out.npy")
        assert embed(model, tmp_path / "in.txt", output, "--precision", precision) == 0
        jobs.append((read_note(output).job, read_note(output).precision, output.stat().st_ino))
        build_index(output, tmp_path / f"index-{number}")
    assert jobs[0] == jobs[1] == jobs[2]
    assert (jobs[2][1], jobs[3][1]) == ("fp32", "bf16")
    assert jobs[3][0] != jobs[0][0] == jobs[4][0]
    raw = (tmp_path / "in.txt").read_text()
    (tmp_path / "in.txt").write_text(raw.replace("ab cd", "cd ab"))  # of the same size
    before = vectors(output)
    assert embed(model, tmp_path / "in.txt", output) == 0
    assert np.abs(vectors(output)[0] - before[0]).max() > 1e-3
    output.write_bytes(b"x")
    with pytest.raises(UsageError, match="its size differs"):
        read_note(output)


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.usefixtures("session")
def test_ray_writes_the_same_bytes_as_this_process(model, tmp_path, monkeypatch):
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)  # relative paths must reach the workers
    for workers, output in ((0, "here.npy"), (2, "ray.npy")):
        assert embed(model, "several", output, "--workers", workers, "--unit-mib", 0.0005) == 0
    assert (tmp_path / "here.npy").read_bytes() == (tmp_path / "ray.npy").read_bytes()


def test_worker_of_embed_with_another_encoder_than_the_command_has_is_refused(model, tmp_path):
    """The name of a run means its newest checkpoint, which may appear between the two."""
    write_inputs(tmp_path)
    config = EmbedConfig(choice={"model": model}, inputs=[str(tmp_path / "in.txt")], output=tmp_path / "out.npy")
    row = {"unit": plan(config)[0].model_dump_json(), "identity": "x"}
    vectors = [vectors_fingerprint(load_encoder(model, precision=precision)) for precision in ("fp32", "bf16")]
    found = [UnitEmbedder(config, str(tmp_path), vectors=each)(row) for each in vectors]
    assert found[0]["sidecar"]
    assert not found[1]["sidecar"]
    says(found[1]["problem"], model, "another encoder", "checkpoint", "--precision")


MODEL = "hashed-words:256"


@pytest.fixture
def command(tmp_path):
    """Words that embed 3,000 texts; what is missing is the output."""
    (tmp_path / "in.txt").write_text("".join(f"word{number} and more\n" for number in range(3000)))
    return ["embed", MODEL, str(tmp_path / "in.txt"), "--unit-mib", "0.01", "--output"]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["npy", "parquet"])
def test_a_full_disk_is_told_and_the_same_command_continues(command, tmp_path, suffix, capsys):
    with small_volume(tmp_path / "disk", 16) as volume:
        output = volume.path / f"out.{suffix}"
        command.append(str(output))
        for left in (0, 2**18):  # in the first unit, in a later one
            volume.fill(leave_bytes=left)
            assert main(command) == 1
            message = capsys.readouterr().err.splitlines()[-1]
            assert "No space left" in message
            if left:  # units are finished
                says(message, "same command")
            assert not output.exists()
            volume.drain()
        assert main(command) == 0
        place, map_file = volume.path / "index", volume.path / "map.parquet"
        index = ["index", str(output), "--output", str(place), "--parquet", str(map_file)]
        for left in (2**20, 3_340_000):  # in the vectors of 3.1 MB, in the map of 0.25 MB
            volume.fill(leave_bytes=left)
            assert main(index) == 1
            says(capsys.readouterr().err, f"--output {place}:", "No space left on device; nothing was written")
            assert not place.exists()
            assert not map_file.exists()
            volume.drain()
        assert main(index) == 0


def test_an_output_in_use_is_refused_and_parts_that_could_not_be_removed_are_removed(command, tmp_path, refused):
    output, parts = tmp_path / "out.npy", tmp_path / ".out.npy.parts"
    command.append(str(output))
    parts.mkdir()
    with (parts / ".lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        refused(command, "another `declutr embed`", "another file")
        assert parts.is_dir()
        assert not output.exists()
    assert main(command) == 0  # what a killed one leaves holds nobody up
    assert np.load(output).shape == (3000, 256)
    assert not parts.exists()
    output.unlink()
    (tmp_path / "disk").mkdir()
    parts.symlink_to(tmp_path / "disk")  # which no `rmtree` removes
    assert main(command) == 0
    parts.unlink()
    (tmp_path / "disk").rename(parts)
    assert (parts / "00000.json").is_file()
    assert main(command) == 0
    assert not parts.exists()
    parts.mkdir()
    (parts / "00000.json").touch()  # after the note: of another job, which was killed
    assert main(command) == 0
    assert (parts / "00000.json").exists()


KILLED_BEFORE = """
import os, sys
from declutr.cli.main import main

def kill(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith(sys.argv[1]):
        os.kill(os.getpid(), 9)

sys.addaudithook(kill)
main(sys.argv[2:])
"""


def killed(name, command):
    """Runs a command to the moment at which a file would take this name, and kills it there."""
    assert run_python("-c", KILLED_BEFORE, name, *command, check=False).returncode == -signal.SIGKILL


@pytest.mark.slow
def test_killed_and_started_again_it_writes_the_same_bytes_and_reads_replaced_inputs_anew(command, tmp_path):
    assert main([*command, str(tmp_path / "whole.npy")]) == 0
    parts, output = tmp_path / ".out.npy.parts", tmp_path / "out.npy"
    killed("/00002.json", [*command, str(output)])
    assert not output.exists()
    assert sorted(path.name for path in parts.glob("*.json")) == ["00000.json", "00001.json"]
    os.link(parts / "00000.json", tmp_path / "kept")
    before = (tmp_path / "kept").stat().st_mtime_ns
    assert main([*command, str(output)]) == 0
    assert (tmp_path / "kept").stat().st_mtime_ns == before, "a finished unit was done again"
    assert output.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert not parts.exists()
    killed("/again.npy", [*command, str(tmp_path / "again.npy")])  # its units are finished
    texts = tmp_path / "in.txt"
    times = texts.stat()
    texts.write_text(texts.read_text().replace("word0 and", "other and"))  # of the same size and time
    os.utime(texts, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert texts.stat().st_size == times.st_size
    for name in ("again.npy", "new.npy"):
        assert main([*command, str(tmp_path / name)]) == 0
    assert np.array_equal(np.load(tmp_path / "again.npy"), np.load(tmp_path / "new.npy"))


@pytest.mark.slow
@pytest.mark.parametrize("renamed", [pytest.param("/00000.json", marks=pytest.mark.nightly), "/out.npy.json"])
def test_embed_killed_before_its_note_leaves_no_vectors_to_the_note_of_other_texts(command, tmp_path, renamed):
    """`out.npy` and the part of a unit take their names before the file that says whose they are."""
    words = [command[2], "--output", str(tmp_path / "out.npy")]
    (tmp_path / "other.txt").write_text((tmp_path / "in.txt").read_text().replace("more", "less"))
    before, other = ["embed", MODEL, *words], ["embed", MODEL, str(tmp_path / "other.txt"), *words[1:]]
    assert main(["embed", MODEL, *words[:2], str(tmp_path / "whole.npy")]) == 0
    if renamed == "/00000.json":
        killed("/out.npy", before)
    else:
        assert main(before) == 0
    killed(renamed, other)
    assert main(before) == 0
    assert (tmp_path / "out.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
