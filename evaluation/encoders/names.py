"""Names of encoders: folders and files that are missing, found without torch."""

from pathlib import Path

from declutr.common.hub import looks_like_a_path
from declutr.common.paths import expand
from declutr.common.suggestions import suggest


def missing(name: str) -> str | None:
    """The problem of a name that can only be a path where nothing is; None for all other names."""
    if ":" in name or not looks_like_a_path(name) or expand(name).exists():
        return None
    return f"{name} cannot be loaded: there is no such folder{near(name)}"


def near(name: str) -> str:
    """A suggestion of the nearest path in the folder above a path, if there is one."""
    above = expand(name).parent
    return suggest(name, [str(Path(name).parent / path.name) for path in above.iterdir()]) if above.is_dir() else ""


def no_encoder(folder: Path) -> str | None:
    """The problem of an existing folder without the files of an encoder; None if it has one of them."""
    if not folder.is_dir() or any((folder / name).is_file() for name in ("config.json", "modules.json")):
        return None
    shards = "holds prepared shards, not an encoder" if (folder / "manifest.json").is_file() else "is no encoder"
    return f"{folder} {shards}: it has neither config.json nor modules.json; name a run, or the folder `export` of one"
