"""Paths as people write them: what is expanded, what is refused, and a look that leaves nothing behind."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
from messages import says

from declutr.common.errors import UsageError
from declutr.common.hub import looks_like_a_path
from declutr.common.paths import expand, folder_problem, path_argument

ROOT = Path(__file__).resolve().parents[2]


def test_home_and_variables_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MINE", "runs")
    assert expand("~/x") == tmp_path / "x"
    assert path_argument("~/$MINE/${MINE}") == tmp_path / "runs" / "runs"
    assert expand("a b\né") == Path("a b\né")
    assert expand("./s3:/x") == Path("s3:/x")
    assert expand("runs/12:30") == Path("runs/12:30")


def test_a_name_that_exists_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("$NOT_SET").mkdir()
    assert expand("$NOT_SET") == Path("$NOT_SET")


@pytest.mark.parametrize(
    "path", ["", " ", "a\0b", "$NOT_SET/x", "${NOT_SET}", "~no-such-user/x", "s3:/bucket/x", "file:/tmp/x", "C:\\x"]
)
def test_path_that_names_no_place_is_refused(path, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(UsageError):
        expand(path)
    with pytest.raises(argparse.ArgumentTypeError):
        path_argument(path)


@pytest.mark.skipif(os.getuid() != 0, reason="takes the identity of a user without a home folder")
def test_path_without_any_home_is_refused():
    code = "from declutr.common.paths import expand\nimport os; os.setuid(54321)\nexpand('~/x')"
    bare = {"PYTHONPATH": str(ROOT / "src"), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=False)
    says(done.stderr, ".UsageError", "'~/x'", "home folder")


def test_folder_problem_names_what_is_in_the_way(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    assert folder_problem(tmp_path) is None
    assert folder_problem(tmp_path / "a" / "b") is None
    says(folder_problem(tmp_path / "file"), "a file", "folder")
    says(folder_problem(tmp_path / "file" / "below"), "a file", "folder")
    says(folder_problem(tmp_path / "link"), "link to nothing")
    says(folder_problem(tmp_path / ("x" * 300)), "too long")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_system_is_asked_not_the_permissions():
    says(folder_problem(Path("/proc/nope")), "/proc")


@pytest.mark.parametrize("name", ["/a", "./a", "../a", "~/a", "a/b/c", "a/", ".", "a b", "$A/b", "a\\b", ""])
def test_names_that_can_only_be_paths(name):
    assert looks_like_a_path(name)


@pytest.mark.parametrize("name", ["distilroberta-base", "sentence-transformers/all-MiniLM-L6-v2", "a.b/c_d.e"])
def test_names_the_hub_can_have(name):
    assert not looks_like_a_path(name)
