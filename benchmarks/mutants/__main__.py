"""Plant each mutant in a copy of the project and run its tests: `python -m benchmarks.mutants`, or `make mutants`.

One process imports the libraries and forks for each mutant, so that a mutant costs its tests alone. Tests that need
Ray, process groups or more than ten seconds are left out. A run that was stopped continues with the mutants that are
left.
"""

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from declutr.common.storage import hash_json, write_json


@dataclass(frozen=True)
class Mutant:
    """A bug to be planted.

    Attributes:
        file: path of the file from the root of the project.
        old: text that occurs once in it.
        new: text in its place.
        tests: test files from the root, or tests of a file.
        equivalent: reason why no test can notice; empty for a bug.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def package(self) -> str:
        """The package of the file."""
        return self.file.removeprefix("src/declutr/").split("/")[0]

    def planted(self, root: Path) -> str:
        """The content of the changed file.

        Raises:
            ValueError: the old text does not occur exactly once.
        """
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.file}: {self.old!r} occurs {text.count(self.old)} times, not once; correct the list"
            )
        return text.replace(self.old, self.new)

    def key(self, root: Path) -> str:
        """Identity of the mutant with the present content of its file and tests; a result of another is not reused."""
        contents = [(root / name.split("::")[0]).read_text() for name in (self.file, *self.tests)]
        return hash_json([self.file, self.old, self.new, contents])


def read_mutants(path: Path) -> list[Mutant]:
    """Reads a list: groups of a file, its tests, and pairs of old and new text, with a reason if equivalent."""
    found = []
    for group in yaml.safe_load(path.read_text()):
        for old, new, *reason in group["mutants"]:
            found.append(Mutant(group["file"], old, new, tuple(group["tests"].split()), *reason))
    return found


ROOT = Path(__file__).resolve().parents[2]
COPIED = ("pipeline", "trainer", "src", "benchmarks", "tests", "configs", "deploy", "docs")
"""Folders that the tests of a mutant have."""
_LIBRARIES = ("pytest", "torch", "transformers", "pyarrow.parquet", "pydantic", "ray.data", "ray.train")
_FAST = "not ray and not dist and not slow and not gpu and not cluster"
_OPTIONS = (
    "-p",
    "no:cacheprovider",
    "-p",
    "pytest_timeout",
    "--tb=short",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)
_LEAST_SECONDS = 30.0  # a mutant may take three times as long as the tests do without it, and at least this long
_RESULTS = {0: "survived", 1: "killed", 2: "killed"}  # by pytest's status; 2: a file of tests cannot be imported


def copy_project(folder: Path) -> None:
    """Copies the project's code and tests."""
    for name in COPIED:
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "Makefile", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / name)


def run_tests(folder: Path, tests: Iterable[str], seconds: float, writes: bool) -> int | None:
    """Runs tests in a forked process; returns pytest's status, or None if they took longer than `seconds`.

    `writes` keeps the compiled files; those of a mutant must not stay.
    """
    child = os.fork()
    if child == 0:
        _run_tests(folder, list(tests), writes)
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also processes that its tests started
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _run_tests(folder: Path, tests: list[str], writes: bool) -> None:
    """Runs pytest in this process and ends it."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(folder)
    sys.path[:0] = [str(folder / "src"), str(folder)]
    for name in [name for name in sys.modules if name.split(".")[0] in ("declutr", "benchmarks")]:
        del sys.modules[name]
    sys.dont_write_bytecode = not writes
    os.environ |= {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | (
        {} if writes else {"PYTHONDONTWRITEBYTECODE": "1"}
    )
    with (folder / "output").open("w") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    import pytest

    status = 3
    try:
        status = int(pytest.main([*tests, "-x", "-q", "-m", _FAST, *_OPTIONS]))
    except BaseException:  # noqa: BLE001 - a forked process must not continue as its parent
        traceback.print_exc(file=sys.stdout)
    finally:
        sys.stdout.flush()
        os._exit(status)


class Laboratory:
    """A copy of the project in which mutants are planted one after the other.

    Args:
        folder: the copy.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seconds: dict[tuple[str, ...], float] = {}
        self._failing: dict[tuple[str, ...], str] = {}

    def result(self, mutant: Mutant) -> str:
        """`killed`, `survived`, or `slow` if the tests took longer than they may, which also counts as killed.

        Raises:
            ValueError: the tests fail without a mutant, or the mutant does not fit its file.
        """
        limit = max(_LEAST_SECONDS, 3 * self._healthy_seconds(mutant.tests))
        path = self.folder / mutant.file
        original, times = path.read_text(), path.stat()
        path.write_text(mutant.planted(self.folder))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 10**12))  # or the compiled original would be taken
        try:
            status = run_tests(self.folder, mutant.tests, limit, writes=False)
        finally:
            path.write_text(original)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return "slow" if status is None else _RESULTS.get(status, "killed")

    def _healthy_seconds(self, tests: tuple[str, ...]) -> float:
        """Time of the tests without a mutant."""
        if tests in self._failing:
            raise ValueError(self._failing[tests])
        if tests not in self._seconds:
            began = time.monotonic()
            status = run_tests(self.folder, tests, 900, writes=True)
            if status != 0:
                self._failing[tests] = f"{' '.join(tests)}: status {status} without a mutant\n{self.output()}"
                raise ValueError(self._failing[tests])
            self._seconds[tests] = time.monotonic() - began
        return self._seconds[tests]

    def output(self) -> str:
        """The end of what the last tests printed."""
        return "\n".join((self.folder / "output").read_text().splitlines()[-25:])


def table(results: Iterable[dict[str, Any]]) -> str:
    """The number of mutants by package and result."""
    found = Counter((one["package"], "killed" if one["result"] == "slow" else one["result"]) for one in results)
    lines = [f"{'package':12}{'killed':>8}{'survived':>10}{'equivalent':>12}"]
    for package in (*sorted({package for package, _ in found}), "all"):
        of = [sum(n for (p, r), n in found.items() if package in (p, "all") and r == result) for result in _ENDS]
        lines.append(f"{package:12}{of[0]:8}{of[1]:10}{of[2]:12}")
    return "\n".join(lines)


_ENDS = ("killed", "survived", "equivalent")


def main() -> int:
    """Runs the mutants that have no result yet; the status is 1 if any survived or could not be run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("runs/mutants.json"), help="results, also of earlier runs")
    parser.add_argument("--list", type=Path, default=Path(__file__).with_name("mutants.yaml"), help="the mutants")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="PATH", help="files whose path starts so, in this order"
    )
    options = parser.parse_args()
    known = {one["key"]: one for one in json.loads(options.json.read_text())} if options.json.exists() else {}
    every = sorted(read_mutants(options.list), key=lambda one: one.tests)
    mutants = [one for start in options.only for one in every if one.file.startswith(start)]
    for name in _LIBRARIES:
        importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the running tests too
    results: list[dict[str, Any]] = []
    not_run: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_project(Path(folder))
        laboratory = Laboratory(Path(folder))
        for mutant in mutants:
            key = mutant.key(laboratory.folder)
            if key not in known:
                try:
                    result = "equivalent" if mutant.equivalent else laboratory.result(mutant)
                except ValueError as error:
                    not_run.append(str(error))
                    continue
                known[key] = {"key": key, "package": mutant.package, "result": result, **vars(mutant)}
                write_json(options.json, list(known.values()))
                print(f"{result:10} {mutant.file}: {mutant.old!r} -> {mutant.new!r}", flush=True)
            results.append(known[key])
    print(table(results))
    for reason in dict.fromkeys(not_run):
        print(f"not run: {reason}", file=sys.stderr)
    return int(bool(not_run) or any(one["result"] == "survived" for one in results))


if __name__ == "__main__":
    sys.exit(main())
