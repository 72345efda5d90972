"""The output of a long command: into a file, into a pipe that is closed, in a poor encoding."""

import os
import subprocess
import sys

import pytest

from declutr.common.console import logs

WORK = """
import sys
from declutr.common.console.logs import get_logger, setup_logging
from declutr.common.console.logs import bar
setup_logging("work")
print("first", flush=True)
sys.stdin.readline()
with bar(total=3, desc="work", unit="step") as shown:
    for number in range(3):
        shown.update()
        shown.refresh()
        get_logger().info("step %d", number)
        print("step", number, flush=True)
        sys.stderr.writelines(["a line\\n"])
        sys.stdout.writelines(["a line\\n"])
with open(sys.argv[1], "w") as stream:
    stream.write("done")
"""


@pytest.mark.parametrize("closed", ["stdout", "stderr", "both"])
def test_work_goes_on_when_nobody_reads(tmp_path, closed):
    """As in `train 2>&1 | head -1`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if closed == "both":
        pipes["stderr"] = subprocess.STDOUT
    process = subprocess.Popen([sys.executable, "-c", WORK, str(tmp_path / "end")], **pipes)
    if closed != "stderr":
        assert process.stdout.readline() == b"first\n"
        process.stdout.close()
    if closed == "stderr":
        process.stderr.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.wait(60) == 0
    assert (tmp_path / "end").read_text() == "done"


def test_characters_that_the_encoding_lacks_are_escaped():
    program = "from declutr.common.console.logs import setup_logging, get_logger; setup_logging('x'); print('é …');"
    program += "get_logger().info('ü')"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"\\xe9 \\u2026\n"
    assert b"\\xfc" in done.stderr


def test_a_bar_in_a_file_is_a_line_a_minute(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(logs, "Lines", lambda: bars_lines(now))
    with logs.bar(total=300, desc="train", unit="step") as shown:
        for step in range(300):
            now[0] = float(step + 1)
            shown.n = step + 1
            shown.set_postfix_str(f"loss {step}")
    lines = capsys.readouterr().err.split("\n")
    assert lines.pop() == ""
    assert ["20%" in lines[0], "100%" in lines[-1]] == [True, True]
    assert 5 <= len(lines) <= 6
    assert all("train" in line and "\r" not in line and "\x1b" not in line for line in lines)


def bars_lines(now, kind=logs.Lines):
    return kind(clock=lambda: now[0])
