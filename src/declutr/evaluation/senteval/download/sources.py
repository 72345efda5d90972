"""Addresses of the data, from `sources.json`: single files, archives, and data that cannot be fetched, with reasons."""

from collections.abc import Collection, Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from declutr.common.config import Strict
from declutr.evaluation.senteval.checks.published import published
from declutr.evaluation.senteval.data.loading import task_files
from declutr.evaluation.senteval.data.tasks import find


def _within(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/") or not path.startswith(("downstream/", "probing/")):
        raise ValueError(f"{path!r} is not below downstream/ or probing/")
    return path


DataPath = Annotated[str, AfterValidator(_within)]
"""Path of a file relative to the data folder."""
Url = Annotated[str, Field(pattern="^https?://")]


class RemoteFile(Strict):
    """File that is served in the form SentEval reads."""

    path: DataPath
    url: Url
    git_sha1: str = ""
    """Required git SHA-1; if empty, the published hash of `path`."""

    @property
    def expected(self) -> str:
        """Required hash, "" if unknown."""
        return self.git_sha1 or known_hashes().get(self.path, "")


class RemoteArchive(Strict):
    """Tar archive with files that SentEval reads; members are found by the end of their names."""

    url: Url
    origin: str = Field(default="", alias="from")
    """Origin of the archive and known facts about it."""
    below: str = ""
    """Prefix of the data folder's paths that members' names lack."""
    paths: tuple[DataPath, ...]


class RemoteSnli(Strict):
    """SNLI's zip, from which SentEval's nine files are made."""

    url: Url


class Gone(Strict):
    """Tasks whose data cannot be fetched."""

    tasks: tuple[str, ...]
    why: str
    """Reason, and what to do."""


class Sources(Strict):
    """All sources."""

    about: str = ""
    """Remarks on pinned addresses and failed attempts."""
    files: tuple[RemoteFile, ...] = ()
    archives: tuple[RemoteArchive, ...] = ()
    snli: RemoteSnli | None = None
    gone: tuple[Gone, ...] = ()
    unused: tuple[dict[str, str], ...] = ()
    """Unused addresses of the official script, with reasons."""


@cache
def public_sources() -> Sources:
    """Sources that come with the package."""
    return Sources.model_validate_json(files(__package__).joinpath("sources.json").read_bytes())


@cache
def known_hashes() -> Mapping[str, str]:
    """Git's SHA-1 of every known published file, by path."""
    return {path: digest for figures in published().values() for path, digest in figures.files.items()}


def restricted(sources: Sources, names: Collection[str]) -> Sources:
    """Return the sources of these tasks alone."""
    wanted = {path for name in names for path in task_files(find(name))}
    archives = [
        archive.model_copy(update={"paths": tuple(path for path in archive.paths if path in wanted)})
        for archive in sources.archives
    ]
    changed: dict[str, Any] = {
        "files": tuple(file for file in sources.files if file.path in wanted),
        "archives": tuple(archive for archive in archives if archive.paths),
        "snli": sources.snli if "SNLI" in names else None,
        "gone": tuple(gone for gone in sources.gone if set(gone.tasks) & set(names)),
    }
    return sources.model_copy(update=changed)


def relocated(sources: Sources, address: str) -> Sources:
    """Return the same sources at another address, for example a private mirror `http://mirror/senteval`.

    A file is then expected at `address/<path>`, an archive at `address/<its file name>`.
    """
    there = address.rstrip("/")
    changed: dict[str, Any] = {
        "files": [{**file.model_dump(), "url": f"{there}/{file.path}"} for file in sources.files],
        "archives": [
            {**archive.model_dump(by_alias=True), "url": f"{there}/{archive.url.rsplit('/', 1)[-1]}"}
            for archive in sources.archives
        ],
    }
    if sources.snli:
        changed["snli"] = {"url": f"{there}/{sources.snli.url.rsplit('/', 1)[-1]}"}
    return Sources.model_validate({**sources.model_dump(by_alias=True), **changed})
