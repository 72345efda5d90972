"""SNLI in SentEval's form, made from the corpus' zip: labels, premises and hypotheses, a file each, tokenised.

The zip is read as a stream, member by member, without extraction. A file is kept only if it has the published hash;
otherwise its tokenisation would differ from SentEval's.

Its sentences are tokenized as the Penn Treebank, one a line. The rules are those of the Penn Treebank project's sed
script of 1995 (SentEval's data/downstream/tokenizer.sed), to the byte, including a space after every sentence, so that
files can be compared with published hashes.
"""

import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from declutr.common.errors import DataError
from declutr.common.storage import atomic_file
from declutr.evaluation.senteval.data.lines import git_sha1

_CONTRACTED = ("ll", "re", "ve", "LL", "RE", "VE")
_MERGED = {  # contractions spoken as one word, and their parts
    r"([Cc])annot": r"\1an not",
    r"([Dd])'ye": r"\1' ye",
    r"([Gg])imme": r"\1im me",
    r"([Gg])onna": r"\1on na",
    r"([Gg])otta": r"\1ot ta",
    r"([Ll])emme": r"\1em me",
    r"([Mm])ore'n": r"\1ore 'n",
    r"'([Tt])is": r"'\1 is",
    r"'([Tt])was": r"'\1 was",
    r"([Ww])anna": r"\1an na",
}
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r'^"', "`` "),  # a quote opens at the start and after a space or a bracket; every other one closes
        (r'([ (\[{<])"', r"\1 `` "),
        (r"\.\.\.", " ... "),
        (r"[,;:@#$%&]", r" \g<0> "),
        (r"([^.])(\.)([\])}>\"']*) *$", r"\1 \2\3 "),  # only the last full stop: others may be abbreviations
        (r"[?!]", r" \g<0> "),
        (r"[\]\[(){}<>]", r" \g<0> "),
        (r"--", " -- "),
        (r"$", " "),
        (r"^", " "),
        (r'"', " '' "),
        (r"([^'])' ", r"\1 ' "),
        (r"'([sSmMdD]) ", r" '\1 "),
        *((f"'{end} ", f" '{end} ") for end in _CONTRACTED[:3]),
        ("n't ", " n't "),
        *((f"'{end} ", f" '{end} ") for end in _CONTRACTED[3:]),
        ("N'T ", " N'T "),
        *((f" {word} ", f" {parts} ") for word, parts in _MERGED.items()),
        (r" +", " "),
        (r"^ *", ""),
    )
]


def tokenize(line: str) -> str:
    """Separate words by one space, with one after the last; `line` has no line end."""
    for pattern, replacement in _RULES:
        line = pattern.sub(replacement, line)
    return line


FILES = ("labels", "s1", "s2")
_COLUMNS = ("gold_label", "sentence1", "sentence2")
_MAX_LINE_CHARACTERS = 1 << 20


def make_split(archive: Path, split: str, folder: Path, hashes: dict[str, str]) -> None:
    """Write `labels.<split>`, `s1.<split>` and `s2.<split>` into `folder`, all three or none.

    `hashes` has the required git SHA-1 of each file, by name; a file without one is not checked.

    Raises:
        DataError: the zip lacks the split or has other columns, or a file has another hash.
    """
    paths = [folder / f"{name}.{split}" for name in FILES]
    with atomic_file(paths[0]) as labels, atomic_file(paths[1]) as first, atomic_file(paths[2]) as second:
        with labels.open("wb") as one, first.open("wb") as two, second.open("wb") as three:
            for label, premise, hypothesis in _pairs(archive, f"snli_1.0_{split}.txt"):
                one.write(f"{label}\n".encode())
                two.write(f"{tokenize(premise)}\n".encode())
                three.write(f"{tokenize(hypothesis)}\n".encode())
        for path, aside in zip(paths, (labels, first, second), strict=True):
            expected = hashes.get(path.name, "")
            if expected and (found := git_sha1(aside)) != expected:
                raise DataError(f"{path.name} made from {archive.name} has git SHA-1 {found}, expected {expected}")


def _pairs(archive: Path, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield label, premise and hypothesis of every pair with a label."""
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [member for member in opened.namelist() if member.rsplit("/", 1)[-1] == name]
            members = [member for member in members if "__MACOSX" not in member]
            if len(members) != 1:
                raise DataError(f"{archive.name} holds {len(members)} files named {name}, expected one")
            with opened.open(members[0]) as stream, io.TextIOWrapper(stream, encoding="utf-8", newline="\n") as lines:
                header = lines.readline(_MAX_LINE_CHARACTERS).rstrip("\n").split("\t")
                if (header[0], *header[5:7]) != _COLUMNS:
                    raise DataError(f"{name} has columns {', '.join(header[:7])}, unlike SNLI 1.0")
                while line := lines.readline(_MAX_LINE_CHARACTERS):
                    cells = line.rstrip("\n").split("\t")
                    if cells[0] != "-":
                        yield cells[0], cells[5], cells[6]
    except (zipfile.BadZipFile, IndexError, UnicodeDecodeError) as error:
        raise DataError(f"{archive.name} is broken or not SNLI 1.0: {error}") from error
