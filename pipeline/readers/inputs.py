"""Finding files: here, on S3 and Google Storage by pyarrow, on other protocols by fsspec, in datasets of the Hub.

Of a dataset, the data files of one split at one commit are read; its scripts are never run.
"""

import fnmatch
import glob
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsspec.utils import glob_translate

from declutr.common.hub import hub_problem
from declutr.common.paths import expand
from declutr.common.stores.address import (
    address_of,
    files_below,
    filesystem,
    is_object_store,
    is_remote,
    network_errors,
)
from declutr.pipeline.readers.corpus import (
    JSON_SUFFIX,
    MARKDOWN,
    SUFFIXES,
    TAR_SUFFIX,
    HubCorpus,
    Input,
    bare_suffix,
    is_hidden,
)
from declutr.pipeline.readers.skipped import FOLDER, LINKED_FOLDER, SPECIAL, Skipped

# What holds tokens or vectors and no texts, by files that `prepare` and `index` write.
_WITHOUT_TEXTS = {"shards": ("manifest.json", "ledger"), "an index": ("index.json", "vectors.npy")}


def find_inputs(entry: str, skipped: Skipped) -> Iterator[Input]:
    """Finds the files of one entry of `corpus.paths`.

    Unreadable entries are included and marked as lost. Entries that are neither files nor searched are counted in
    `skipped`.
    """
    if is_remote(entry):
        yield from _find_remote(entry)
        return
    root = expand(entry)
    if root.is_file():
        yield _local(root, root.name, searched=False)
    elif root.is_dir():
        for what, names in _WITHOUT_TEXTS.items():
            if all((root / name).exists() for name in names):
                raise OSError(f"it is {what}, without texts; name the documents that it was made from")
        yield from _match(root, ("**", "*"), skipped)
    elif glob.has_magic(str(root)):
        num_plain = next(number for number, part in enumerate(root.parts) if glob.has_magic(part))
        yield from _match(Path(*root.parts[:num_plain]), root.parts[num_plain:], skipped)
    elif root.exists():
        raise OSError("it is a pipe, a socket or a device, which cannot be read again; write its content to a file")


def _match(plain: Path, parts: tuple[str, ...], skipped: Skipped) -> Iterator[Input]:
    """Finds everything below a folder that matches a pattern, given as its components.

    `**` does not follow links to folders, because they may form a loop. Hidden names are left out, as shells do.
    """
    lost: dict[Path, OSError] = {}
    matches = [plain]
    for number, part in enumerate(parts):
        folders = [path for path in matches if os.path.isdir(path)] if number else matches  # noqa: PTH112
        steps = [path for folder in folders for path in _step(folder, part, lost)]
        matches = [path for path in dict.fromkeys(steps) if not is_hidden(path.relative_to(plain).as_posix())]
    if plain in lost:
        raise lost[plain]
    yield from (_lost(path, path.relative_to(plain).as_posix()) for path in lost)
    if parts[-1] != "**":  # a last ** matches only folders
        for path in sorted(matches):
            yield from _input(path, path.relative_to(plain).as_posix(), "**" in parts, skipped)


def _input(path: Path, relative: str, below: bool, skipped: Skipped) -> Iterator[Input]:
    """The input of a match, marked as lost if it cannot be read; a folder or a special file counts as skipped.

    With `below`, the pattern also matches the files in folders, so that a folder was not left out.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        yield _lost(path, relative)
        return
    if stat.S_ISREG(mode):
        yield _local(path, relative, searched=True)
    elif not stat.S_ISDIR(mode):
        skipped.add(SPECIAL, relative)
    elif not below:
        skipped.add(FOLDER, relative)
    elif path.is_symlink():
        skipped.add(LINKED_FOLDER, relative)


def _step(folder: Path, part: str, lost: dict[Path, OSError]) -> Iterator[Path]:
    """Paths in a folder that match one component of a pattern; folders that cannot be listed are added to `lost`."""
    try:
        if part == "**":
            yield folder
            for parent, names, _ in os.walk(folder, onerror=lambda error: lost.update({Path(error.filename): error})):
                names[:] = [name for name in names if not name.startswith(".")]  # in place: os.walk goes into these
                below = (Path(parent, name) for name in names)
                yield from (path for path in below if not os.path.islink(path))  # noqa: PTH114
        elif glob.has_magic(part):
            yield from (path for path in folder.iterdir() if fnmatch.fnmatchcase(path.name, part))
        else:
            (folder / part).lstat()  # not `stat`: a broken link is a match, and later counts as lost
            yield folder / part
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        lost[folder] = error


def _local(path: Path, source: str, *, searched: bool) -> Input:
    # Resolved, so that a file and its links count once.
    return Input(str(path.resolve()), source, path.stat().st_size, searched)


def _lost(path: Path, source: str) -> Input:
    return Input(str(path.absolute()), source, 0, searched=True, lost=True)


def _find_remote(address: str) -> Iterator[Input]:
    if address.startswith("hf://") and (unreached := hub_problem()):
        raise OSError(unreached)
    with network_errors():
        files, path, query = filesystem(address)
        # Not fsspec's glob and find, which leave out a folder that cannot be listed. Servers of pages, and the Hub,
        # list in another way.
        lists_all = not address.startswith(("http://", "https://", "hf://"))
        if glob.has_magic(path) and not files.isfile(path):  # a key may hold brackets
            parts = path.split("/")
            num_plain = next(number for number, part in enumerate(parts) if glob.has_magic(part))
            root = "/".join(parts[:num_plain])
            if lists_all:
                pattern, levels = re.compile(glob_translate(path)), None if "**" in path else len(parts) - num_plain
                below = files_below(files, root, levels)
                infos = {name: info for name, info in below.items() if pattern.match(name)}
            else:
                infos = files.glob(path, detail=True)
        else:
            root = path.rstrip("/")
            try:
                entry = files.info(path)
            except FileNotFoundError:
                return
            if entry["type"] == "file":
                source = path.rsplit("/", 1)[-1]
                yield Input(address_of(files, path, address, query), source, _size(files, path, entry), searched=False)
                return
            infos = files_below(files, path) if lists_all else files.find(path, detail=True)
        for name in sorted(infos):  # a store lists in any order, and the order of files is that of training
            relative = name.removeprefix(root).lstrip("/")
            if "?" in name and is_object_store(files):
                raise OSError(f"the key {name!r} has a ?, behind which an address has its options; rename it")
            if infos[name]["type"] == "file" and not is_hidden(relative):
                size = _size(files, name, infos[name])
                yield Input(address_of(files, name, address, query), relative, size, searched=True)


def _size(files: Any, name: str, facts: dict[str, Any]) -> int:
    """The size of a file; of a page that lists files, a server tells none."""
    size = facts["size"] if facts["size"] is not None else files.info(name)["size"]
    if size is None:
        raise OSError(f"the server does not tell the size of {name} (Content-Length); download it, and name the file")
    return int(size)


# Branch with the Hub's Parquet copies of datasets in other formats: CONFIG/SPLIT/0000.parquet.
_CONVERTED = "refs/convert/parquet"
# Suffixes of data files; Markdown on the Hub only describes a dataset.
_DATA = {*SUFFIXES, JSON_SUFFIX, TAR_SUFFIX} - MARKDOWN
_SPLIT = re.compile(r"(?<![a-z])(train|training|test|testing|validation|valid|val|dev|eval|evaluation)(?![a-z])")
_SAME_SPLIT = {"training": "train", "testing": "test", "valid": "validation", "val": "validation", "dev": "validation"}

Files = dict[str, int]  # size in bytes of each file, by name


def hub_inputs(corpus: HubCorpus) -> tuple[list[Input], list[str]]:
    """The files of the split with their sizes, and problems, one line each."""
    if unreached := hub_problem():
        return [], [f"corpus.name = {corpus.name!r}: the Hub does not give the dataset: {unreached}"]
    try:
        with network_errors():
            # The commit, because a branch may move while units are read.
            commit, files, card = _listing(corpus.name, corpus.revision)
            chosen, problem = _choose(corpus, files, card)
            if not chosen and not problem and corpus.revision is not None:
                problem = (
                    f"corpus.revision = {corpus.revision!r}: {corpus.name} has no data files of the split "
                    f"{corpus.split!r} there, and the Hub's Parquet copies are of its main branch; remove the revision"
                )
            elif not chosen and not problem:  # a dataset of a script, which is never run
                commit, files, _ = _listing(corpus.name, _CONVERTED)
                chosen, problem = _converted(corpus, files)
    except OSError as error:
        return [], [f"corpus.name = {corpus.name!r}: the Hub does not give the dataset: {error}"]
    if problem:
        return [], [problem]
    # The commit is part of the source, so that a changed dataset counts as another input.
    return [
        Input(
            f"hf://datasets/{corpus.name}@{commit}/{name}", f"{corpus.name}@{commit[:12]}/{name}", size, searched=False
        )
        for name, size in sorted(chosen.items())
    ], []


def _listing(name: str, revision: str | None) -> tuple[str, Files, dict[str, Any]]:
    """Commit, files with their sizes, and the head of the README."""
    from huggingface_hub import HfApi  # imported here because it takes a second

    info = HfApi().dataset_info(name, revision=revision, files_metadata=True)
    files = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    card = dict(info.card_data.__dict__) if info.card_data else {}
    return str(info.sha), files, card


def _choose(corpus: HubCorpus, files: Files, card: dict[str, Any]) -> tuple[Files, str | None]:
    """The data files of the split, as declared in the README or else by their names; or a problem."""
    data = {name: size for name, size in files.items() if bare_suffix(name) in _DATA and not name.startswith(".")}
    configs = card.get("configs")
    if isinstance(configs, list) and configs:
        return _declared(corpus, data, configs)
    if corpus.config is not None:
        data = {name: size for name, size in data.items() if corpus.config in name.split("/")[:-1]}
    splits = {name: _split_of(name) for name in data}
    if not any(splits.values()):
        return (data, None) if corpus.split == "train" else ({}, None)
    split = _SAME_SPLIT.get(corpus.split, corpus.split)
    return {name: size for name, size in data.items() if splits[name] == split}, None


def _split_of(name: str) -> str | None:
    """The split in a file's name or in the name of one of its folders."""
    for part in reversed(name.lower().split("/")):
        if match := _SPLIT.search(part):
            return _SAME_SPLIT.get(match[1], match[1])
    return None


def _declared(corpus: HubCorpus, data: Files, configs: list[Any]) -> tuple[Files, str | None]:
    """The files that the README declares for the configuration and the split."""
    by_name = {str(config.get("config_name", "default")): config for config in configs if isinstance(config, dict)}
    defaults = [name for name, config in by_name.items() if config.get("default")]
    if corpus.config:
        names = [corpus.config]
    else:  # the one marked as default, else the one named so, else the only one
        names = defaults or [name for name in by_name if name == "default"] or list(by_name)
    if len(names) != 1 or names[0] not in by_name:
        return {}, f"corpus.config = {corpus.config!r}: {corpus.name} has the configurations {sorted(by_name)}"
    config = by_name[names[0]]
    folder = str(config.get("data_dir") or "").strip("./")
    patterns: dict[str, list[str]] = {}
    declared = config.get("data_files", [])
    for entry in declared if isinstance(declared, list) else [declared]:
        if isinstance(entry, dict) and "path" in entry:
            paths = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
            patterns.setdefault(str(entry.get("split", "train")), []).extend(map(str, paths))
        elif isinstance(entry, str):
            patterns.setdefault("train", []).append(entry)
    if not patterns:  # only a folder: file names decide the splits
        inside = {name: size for name, size in data.items() if not folder or name.startswith(f"{folder}/")}
        return _choose(corpus.model_copy(update={"config": None}), inside, {})
    if corpus.split not in patterns:
        return {}, f"corpus.split = {corpus.split!r}: {corpus.name} ({names[0]}) has the splits {sorted(patterns)}"
    below = f"{folder}/" if folder else ""  # as `datasets` finds them: `**` stands for no folder, too
    regexes = [re.compile(glob_translate(below + pattern.removeprefix("./"))) for pattern in patterns[corpus.split]]
    return {name: size for name, size in data.items() if any(test.match(name) for test in regexes)}, None


def _converted(corpus: HubCorpus, files: Files) -> tuple[Files, str | None]:
    """The files of the split on the branch of Parquet copies."""
    layout = [(name.split("/"), size) for name, size in files.items() if name.endswith(".parquet")]
    layout = [(parts, size) for parts, size in layout if len(parts) == 3]
    configs = sorted({parts[0] for parts, _ in layout})
    config = corpus.config or ("default" if "default" in configs else configs[0] if len(configs) == 1 else None)
    if config not in configs:
        return {}, f"corpus.config = {corpus.config!r}: {corpus.name} has the configurations {configs}"
    splits = sorted({parts[1].removeprefix("partial-") for parts, _ in layout if parts[0] == config})
    if corpus.split not in splits:
        return {}, f"corpus.split = {corpus.split!r}: {corpus.name} ({config}) has the splits {splits}"
    kept = {
        "/".join(parts): size
        for parts, size in layout
        if parts[0] == config and parts[1].removeprefix("partial-") == corpus.split
    }
    return kept, None
