"""`declutr embed` and `index` on a disk that is full, and two commands with one output."""

import fcntl
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import tinyruns as runs
from messages import says
from volumes import small_volume

from declutr.cli.main import main

MODEL = "hashed-words:256"


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "in.txt").write_text("".join(f"word{number} and more\n" for number in range(3000)))
    return tmp_path / "in.txt"


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["npy", "parquet"])
def test_a_full_disk_is_told_and_the_same_command_continues(texts, tmp_path, suffix, capsys):
    with small_volume(tmp_path / "disk", 16) as volume:
        output = volume.path / f"out.{suffix}"
        command = ["embed", MODEL, str(texts), "--output", str(output), "--unit-mib", "0.01"]
        for left in (0, 2**20):  # in the first unit, in a later one
            volume.fill(leave_bytes=left)
            assert main(command) == 1
            told = capsys.readouterr().err.splitlines()[-1]
            assert "No space left" in told
            says(told, "same command")
            assert not output.exists()
            volume.drain()
        assert main(command) == 0
        place, map_file = volume.path / "index", volume.path / "map.parquet"
        index = ["index", str(output), "--output", str(place), "--parquet", str(map_file)]
        for left in (2**20, 3_340_000):  # in the vectors of 3.1 MB, in the map of 0.25 MB
            volume.fill(leave_bytes=left)
            assert main(index) == 1
            assert capsys.readouterr().err.splitlines()[-1].startswith(("[Errno 28]", str(volume.path)))
            assert not place.exists()
            assert not map_file.exists()
            volume.drain()
        assert main(index) == 0


def test_embed_of_an_output_in_use_is_refused(texts, tmp_path, capsys):
    output, parts = tmp_path / "out.npy", tmp_path / ".out.npy.parts"
    command = ["embed", MODEL, str(texts), "--output", str(output)]
    parts.mkdir()
    with (parts / ".lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        assert main(command) == 1
        says(capsys.readouterr().err, "another `declutr embed`", "another file")
        assert parts.is_dir()
        assert not output.exists()
    assert main(command) == 0  # what a killed one leaves holds nobody up
    assert np.load(output).shape == (3000, 256)
    assert not parts.exists()


@pytest.fixture
def begun(texts, tmp_path):
    """A job whose units are finished, on a disk that had no room for its output."""
    with small_volume(tmp_path / "disk", 16) as volume:
        output = volume.path / "out.npy"
        command = ["embed", MODEL, str(texts), "--output", str(output), "--unit-mib", "0.01"]
        volume.fill(leave_bytes=5 * 2**20)
        assert main(command) == 1
        assert sum(path.stat().st_size for path in (volume.path / ".out.npy.parts").iterdir()) > 3000 * 256 * 4
        volume.drain()
        yield command, output


def test_inputs_replaced_between_kill_and_restart_are_read_anew(begun, texts):
    """Another content of the same size and time."""
    command, output = begun
    times = texts.stat()
    texts.write_text(texts.read_text().replace("word0 and", "other and"))
    os.utime(texts, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert texts.stat().st_size == times.st_size
    assert main(command) == 0
    assert main([*command[:4], str(output.with_name("new.npy"))]) == 0
    assert np.array_equal(np.load(output), np.load(output.with_name("new.npy")))


KILLED_BEFORE = """
import os, sys
from declutr.cli.main import main

def kill(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith(sys.argv[1]):
        os.kill(os.getpid(), 9)

sys.addaudithook(kill)
main(sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("renamed", ["/00000.json", "/out.npy.json"])
def test_embed_killed_before_its_note_leaves_no_vectors_to_the_note_of_another_encoder(texts, tmp_path, renamed):
    """`out.npy` and the part of a unit take their names before the file that says whose they are."""
    given = [str(texts), "--output", str(tmp_path / "out.npy")]
    other = ["embed", "hashed-words@1:256", *given]
    assert main(["embed", MODEL, str(texts), "--output", str(tmp_path / "whole.npy")]) == 0
    before = ["embed", MODEL, *given]

    def killed(name, command):
        place = os.environ | {"PYTHONPATH": str(runs.ROOT / "src")}
        done = subprocess.run([sys.executable, "-c", KILLED_BEFORE, name, *command], env=place, check=False)
        assert done.returncode == -signal.SIGKILL

    if renamed == "/00000.json":
        killed("/out.npy", before)  # its units are finished
    else:
        assert main(before) == 0
    killed(renamed, other)
    assert main(before) == 0
    assert (tmp_path / "out.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
