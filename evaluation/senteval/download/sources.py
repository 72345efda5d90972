"""Where the data can be had, from `sources.json`: single files, an archive, and what cannot be fetched and why."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from common.config import Strict
from evaluation.senteval.checks.published import published


def _within(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/") or not path.startswith(("downstream/", "probing/")):
        raise ValueError(f"{path!r} is not below downstream/ or probing/")
    return path


DataPath = Annotated[str, AfterValidator(_within)]
"""A file of the data folder, relative to it."""


class RemoteFile(Strict):
    """A file that is served as SentEval reads it."""

    path: DataPath
    """Where it goes."""
    url: str = Field(pattern="^https?://")
    """Where it comes from."""
    git_sha1: str = ""
    """What it must hash to; the published hash of `path` where there is none."""

    @property
    def expected(self) -> str:
        """The hash it must have, "" where none is known."""
        return self.git_sha1 or known_hashes().get(self.path, "")


class RemoteArchive(Strict):
    """A tar archive with files that SentEval reads; members are found by the end of their names."""

    url: str = Field(pattern="^https?://")
    """Where it comes from."""
    origin: str = Field(default="", alias="from")
    """Who made it and what is known of it."""
    below: str = ""
    """What members' names lack of the data folder's paths."""
    paths: tuple[DataPath, ...]
    """What is taken out of it."""


class RemoteSnli(Strict):
    """SNLI's own zip, from which SentEval's nine files are made."""

    url: str = Field(pattern="^https?://")
    """Where it comes from."""


class Gone(Strict):
    """Tasks that cannot be fetched."""

    tasks: tuple[str, ...]
    """Their names."""
    why: str
    """And what to do."""


class Unused(Strict):
    """An address of the official script that is not used."""

    url: str
    """The address."""
    why: str
    """Why not."""


class Sources(Strict):
    """All of them."""

    about: str = ""
    """What is pinned and what was tried."""
    files: tuple[RemoteFile, ...] = ()
    """Single files."""
    archives: tuple[RemoteArchive, ...] = ()
    """Archives."""
    snli: RemoteSnli | None = None
    """The corpus of SNLI."""
    gone: tuple[Gone, ...] = ()
    """What cannot be fetched."""
    unused: tuple[Unused, ...] = ()
    """Addresses of the official script that are not used."""


@cache
def public_sources() -> Sources:
    """The table that comes with the package."""
    return Sources.model_validate_json(files("evaluation.senteval.download").joinpath("sources.json").read_bytes())


@cache
def known_hashes() -> Mapping[str, str]:
    """Git's SHA-1 of every published file that is known, by path."""
    return {path: digest for figures in published().values() for path, digest in figures.files.items()}


def relocated(sources: Sources, address: str) -> Sources:
    """The same sources at another address: a mirror of one's own, say `http://mirror/senteval`.

    A file is then looked for at `address/<path>`, an archive at `address/<its file name>`.
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
