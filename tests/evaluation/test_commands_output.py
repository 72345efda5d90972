"""Real commands on hostile data, in a terminal of little ability, into a pipe that closes."""

import json
import os
import subprocess
import sys

import pytest
import tinyruns as runs

from declutr.cli.main import main

ENVIRONMENT = os.environ | {"PYTHONPATH": str(runs.ROOT / "src")}


def declutr(*arguments, **more):
    command = [sys.executable, "-m", "declutr.cli.main", *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT | more, capture_output=True, check=False)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """An index whose texts and ids steer a terminal."""
    folder = tmp_path_factory.mktemp("hostile")
    lines = [
        json.dumps({"text": f"cat \x1b[2J\u202e … {number}", "id": f"\x1b]0;x\x07{number}"}) for number in range(3)
    ]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    output = folder / "out.parquet"
    assert main(["embed", "hashed-words:8", str(folder / "in.jsonl"), "--output", str(output), "--id-field", "id"]) == 0
    assert main(["index", str(output), "--output", str(folder / "index")]) == 0
    return folder / "index"


def test_search_shows_what_it_finds(index, capsys):
    assert main(["search", str(index), "cat"]) == 0
    told = capsys.readouterr().out
    assert "⟨U+001B⟩[2J⟨U+202E⟩" in told
    assert all(line.isprintable() for line in told.splitlines())


def test_names_of_files_steer_nothing(tmp_path, capsys):
    name = str(tmp_path / "\x1b[2Jx\u202e\udc80")
    commands = [
        ["inspect", name], ["search", name, "x"], ["index", name, "--output", name],
        ["checkpoints", name], ["embed", "hashed-words:8", name, "--output", f"{name}.npy"], ["report", name],
    ]  # fmt: skip
    for command in commands:
        assert main(command) == 1
        told = capsys.readouterr().err
        assert "⟨U+001B⟩[2J" in told
        assert all(line.isprintable() for line in told.splitlines())


@pytest.mark.slow
def test_commands_write_to_an_ascii_terminal(index):
    done = declutr("search", index, "cat", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u2026" in done.stdout
    done = declutr("evaluate", "--data", index, PYTHONIOENCODING="ascii")
    assert b"Traceback" not in done.stderr


def test_a_traceback_is_shown_for_debugging_only(monkeypatch, capsys):
    def fail(_):
        raise OSError("no space left")

    monkeypatch.setattr("declutr.cli.search.run_search", fail)
    for level, shown in (("INFO", False), ("DEBUG", True)):
        monkeypatch.setenv("DECLUTR_LOG", level)
        assert main(["search", "index", "query"]) == 1
        told = capsys.readouterr().err
        assert told.endswith("declutr search: no space left\n")
        assert ("Traceback" in told) == shown
