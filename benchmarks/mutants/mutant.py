"""A mutant: one file with one changed place, and the tests that are most likely to notice."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from declutr.common.storage import hash_json


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
        return self.file.split("/")[0]

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
