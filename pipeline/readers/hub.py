"""The data files of one split of a Hugging Face Hub dataset at one commit. Scripts of the dataset are never run."""

import fnmatch
import re
from typing import Any

from declutr.common.hub import hub_problem
from declutr.common.stores.address import network_errors
from declutr.pipeline.readers.corpus import JSON_SUFFIX, MARKDOWN, SUFFIXES, TAR_SUFFIX, HubCorpus, Input, bare_suffix

# Branch with the Hub's Parquet copies of datasets in other formats: CONFIG/SPLIT/0000.parquet.
_CONVERTED = "refs/convert/parquet"
# Suffixes of data files; Markdown on the Hub only describes a dataset.
_DATA = {*SUFFIXES, JSON_SUFFIX, TAR_SUFFIX} - MARKDOWN
_SPLIT = re.compile(r"(?<![a-z])(train|training|test|testing|validation|valid|val|dev|eval|evaluation)(?![a-z])")
_SAME_SPLIT = {"training": "train", "testing": "test", "valid": "validation", "val": "validation", "dev": "validation"}

Files = dict[str, int]


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
    names = [corpus.config] if corpus.config else (defaults or [n for n in by_name if n == "default"] or list(by_name))
    if len(names) != 1 or names[0] not in by_name:
        return {}, f"corpus.config = {corpus.config!r}: {corpus.name} has the configurations {sorted(by_name)}"
    config = by_name[names[0]]
    patterns: dict[str, list[str]] = {}
    declared = config.get("data_files", [])
    for entry in declared if isinstance(declared, list) else [declared]:
        if isinstance(entry, dict) and "path" in entry:
            paths = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
            patterns.setdefault(str(entry.get("split", "train")), []).extend(map(str, paths))
        elif isinstance(entry, str):
            patterns.setdefault("train", []).append(entry)
    if not patterns:  # only a folder: file names decide the splits
        folder = str(config.get("data_dir", "")).strip("./")
        inside = {name: size for name, size in data.items() if not folder or name.startswith(f"{folder}/")}
        return _choose(corpus.model_copy(update={"config": None}), inside, {})
    if corpus.split not in patterns:
        return {}, f"corpus.split = {corpus.split!r}: {corpus.name} ({names[0]}) has the splits {sorted(patterns)}"
    regexes = [re.compile(fnmatch.translate(pattern.removeprefix("./"))) for pattern in patterns[corpus.split]]
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
