"""Embedding of text files, and indexes of the embeddings; here what answers for a wrong path before libraries load."""

from collections.abc import Sequence
from pathlib import Path

from declutr.common.errors import UsageError

INDEX = "index.json"


def check_index(folder: Path, arguments: Sequence[str | Path] = ()) -> None:
    """Checks that a folder holds an index; `arguments` stand behind it."""
    if (folder / INDEX).is_file():
        return
    what, file = "is not an index", "EMBEDDINGS"
    if not folder.exists():
        what = "no such folder"
    elif folder.is_file():
        arguments = [*arguments, folder.parent]
        if folder.suffix in (".npy", ".parquet"):
            what, file = "is a file of embeddings, not an index", str(folder)
    advice = f"make one with `declutr index {file} --output FOLDER`"
    if first := next((path for path in arguments if (Path(path) / INDEX).is_file()), None):
        advice = f"name the index, and queries behind it: declutr search {first} QUERY"
    raise UsageError(f"{folder}: {what}; {advice}")


def check_embeddings(file: Path) -> None:
    """Checks that a file exists."""
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "no such file"
        raise UsageError(f"{file}: {what}; name a file of embeddings: declutr embed MODEL INPUT --output FILE.parquet")
