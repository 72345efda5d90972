"""What commands write: no control character steers the terminal, no encoding and no closed pipe ends the work."""

import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import environment, run_python

from declutr.common.console import logs
from declutr.common.console.logs import get_logger, setup_logging
from declutr.common.console.terminal import shown, visible

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x1b[31m\x9b1m\u202eb\rc\bd\x7f\x00\udc80"


CODE = "import sys; from declutr.common.console.terminal import shown\nwith shown():\n    {}"


def test_control_characters_are_visible_everywhere_and_bars_stay_what_they_are(capsys):
    with shown():
        sys.stdout.write(f"{HOSTILE}\n")
        sys.stdout.writelines([HOSTILE, "\n"])
        sys.stderr.write(f"{HOSTILE}\n")
        setup_logging("test")
        get_logger().warning("%s", HOSTILE)
    for text in capsys.readouterr():
        for line in text.replace("\x1b[31m", "⟨U+001B⟩[31m").splitlines():  # a colour changes nothing on standard error
            assert visible(HOSTILE) in line
            assert line.isprintable()
    bars = "\r 50%|#####     |", "\r100%|##########|\n"
    with shown():
        for text in bars:
            sys.stderr.write(text)
    assert capsys.readouterr().err == "".join(bars)


def test_the_reset_of_colours_at_the_end_of_a_process_leaves_no_trace():
    """In a pseudo-terminal, because colorama writes to nothing else."""
    colorama = Path(find_spec("ray").submodule_search_locations[0]) / "thirdparty_files"
    imports = f"import sys; sys.path.append({str(colorama)!r}); import colorama"
    code = f"{imports}\n{CODE.format('colorama.init(strip=False); print(chr(100))')}"
    reader, terminal = os.openpty()
    run_python("-c", code, stdout=terminal, capture_output=False, timeout=60)
    os.close(terminal)
    assert os.read(reader, 1000) == b"d\r\n"
    os.close(reader)


LOGGED = "import sys; from declutr.common.console.logs import setup_logging, get_logger; setup_logging('x'); {}; "
LOGGED += "get_logger().info('\u2713')"


@pytest.mark.parametrize("code", [CODE, LOGGED], ids=["shown", "logged"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_an_encoding_lacks_are_escaped(encoding, code):
    text = code.format("print('\\u2026 \\u2013'); sys.stderr.write('\\u2713')")
    done = run_python("-c", text, env={"PYTHONIOENCODING": encoding}, text=False)
    for stream, escaped in ((done.stdout, b"\\u2026"), (done.stderr, b"\\u2713")):
        assert (escaped in stream) == (encoding != "utf-8")


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_has_gone_ends_the_command_without_a_word(lines):
    """One line fits into the buffer, and meets the closed pipe at the end; many meet it on their way."""
    code = CODE.format(f"print('\\n'.join(map(str, range({lines}))))\n    print('x')")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        process = subprocess.Popen([sys.executable, "-c", code], env=environment(), stdout=pipe, stderr=subprocess.PIPE)
    assert process.communicate()[1] == b""
    assert process.returncode == 141


WORK = """
import sys
from declutr.common.console.logs import bar, get_logger, setup_logging
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
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    pipes["stderr"] = subprocess.STDOUT if closed == "both" else subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", WORK, str(tmp_path / "end")], **pipes)
    if closed == "stderr":
        process.stderr.close()
    else:
        assert process.stdout.readline() == b"first\n"
        process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.wait(60) == 0
    assert (tmp_path / "end").read_text() == "done"


def test_a_bar_in_a_file_is_a_line_a_minute(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(logs, "Lines", partial(logs.Lines, clock=lambda: now[0]))
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
