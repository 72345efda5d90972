"""`declutr publish`: the files of an encoder that others need, in a folder or a repository of the hub, and no others.

Only files of a list are taken. Optimizer states, run folders, settings with paths and documents are not on it.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from declutr.common.hub import client_error, hub_problem
from declutr.common.paths import expand, folder_problem
from declutr.common.storage import DamagedError, atomic_folder, hash_file, write_text
from declutr.common.yamlfile import YamlError, read_yaml
from declutr.evaluation.export.config import ExportError
from declutr.evaluation.export.published import published_graph
from declutr.trainer.checkpoints.exported import EXPORT, SETTINGS, read_settings
from declutr.trainer.driver.model_card import CARD, PLACE

_ALLOWED = re.compile(
    r"(\d+_[A-Za-z]+/)?(config\.json|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json)"
    r"|modules\.json|sentence_bert_config\.json|config_sentence_transformers\.json"
    r"|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(txt|json)|merges\.txt"
)
_NEEDED = ("config.json", "modules.json", "tokenizer.json")
_TEXTS = (".json", ".md", ".txt")
_LICENCE = re.compile(r"^license:.*$", re.MULTILINE)
_OTHER = "other"
"""The word of the hub for a licence that SPDX does not list."""


class PublishError(ValueError):
    """An encoder that cannot be published, or a target that cannot be written to."""


@dataclass(frozen=True)
class Publication:
    """Files of an encoder for others.

    Attributes:
        files: names in the target with the files here.
        card: text of the card.
        left_out: names of the other files of the folder.
    """

    files: dict[str, Path]
    card: str
    left_out: list[str]

    def lines(self) -> Iterator[str]:
        """Every file with its bytes, and their sum."""
        sizes = {name: path.stat().st_size for name, path in self.files.items()} | {CARD: len(self.card.encode())}
        for name, size in sorted(sizes.items()):
            yield f"{size:>14,} bytes  {name}"
        yield f"{sum(sizes.values()):>14,} bytes in {len(sizes)} files"
        if self.left_out:
            yield f"not part of it: {', '.join(self.left_out)}"

    def write(self, folder: Path, place: str) -> None:
        """Copies the files to an empty folder; `place` is how users name the encoder."""
        for name, path in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
        write_text(folder / CARD, self.card.replace(PLACE, place))


def publication(model: str, licence: str | None) -> Publication:
    """The files of an encoder and its card with the licence.

    Args:
        model: a run, its export, the output of an adaptation, or the folder of an encoder made by this project.
        licence: SPDX identifier or `other`; None: the field `license` of the card.

    Raises:
        PublishError: with every problem.
    """
    folder = _encoder_of(expand(model))
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if not path.is_dir()]
    files = {name: folder / name for name in names if _ALLOWED.fullmatch(name)}
    problems = [f"{name}: is missing" for name in _NEEDED if name not in files]
    if not any(name.startswith("model") and name.endswith(".safetensors") for name in files):
        problems.append("model.safetensors: is missing; weights are published as safetensors alone")
    card, wrong = _card(folder, licence)
    problems += wrong
    try:
        graph, use = published_graph(folder)
    except ExportError as error:
        raise PublishError(str(error)) from error
    files |= graph
    card = card.replace("\n## Scores\n", f"{use}\n## Scores\n", 1)
    links = [name for name, path in files.items() if path.is_symlink()]
    problems += [f"{name}: is a link; copy the file" for name in links]
    if not problems:
        problems = [*_altered(folder), *_private(files, card, folder)]
    if problems:
        raise PublishError("\n".join(f"{folder}: {problem}" for problem in problems))
    taken = {path.relative_to(folder).as_posix() for path in files.values() if path.is_relative_to(folder)}
    return Publication(files, card, sorted(set(names) - taken - {CARD}))


def _encoder_of(path: Path) -> Path:
    """The folder of the encoder of a run, an adaptation, or itself."""
    if (path / EXPORT).is_dir():
        return path / EXPORT
    if (path / "result.json").is_file() and (path / "state.json").is_file():
        if not (path / "encoder").is_dir():
            raise PublishError(
                f"{path}: the adaptation wrote no encoder (result.json has its verdict); publish another"
            )
        return path / "encoder"
    if (path / "checkpoints").is_dir():
        raise PublishError(f"{path}: the run is not exported yet; run `declutr train` to its end")
    if not path.is_dir():
        raise PublishError(f"{path}: is no folder; name a run, its export, or the output of `declutr adapt`")
    return path


def _card(folder: Path, licence: str | None) -> tuple[str, list[str]]:
    """The card with its licence filled in, and its problems."""
    if not (folder / CARD).is_file():
        return "", [f"{CARD}: is missing; encoders of `declutr train`, `whiten` and `adapt` have one"]
    try:
        text = (folder / CARD).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return "", [f"{CARD}: is not UTF-8"]
    _, mark, rest = text.partition("---\n")
    head, end, _ = rest.partition("\n---\n")
    try:
        fields = read_yaml(head)
    except YamlError as error:
        return text, [f"{CARD}: its head is no YAML ({error})"]
    if not text.startswith(mark) or not end or not isinstance(fields, dict) or not _LICENCE.search(head):
        return text, [f"{CARD}: has no head with the field `license`; write `---`, `license:` and `---` as first lines"]
    given = licence if licence is not None else fields.get("license")
    if not given:
        return text, [
            "license: is empty. Name one that the start, the data and the code allow: --license apache-2.0 (an SPDX "
            f"identifier, or `{_OTHER}`), or fill the field in {CARD}"
        ]
    try:
        name = _OTHER if given == _OTHER else canonicalize_license_expression(str(given)).lower()
        if " " in name or "licenseref" in name:
            raise InvalidLicenseExpression(name)
    except InvalidLicenseExpression:
        return text, [
            f"license = {given}: is no SPDX identifier (such as apache-2.0, mit, cc-by-4.0) and not `{_OTHER}`"
        ]
    return text.replace(head, _LICENCE.sub(f"license: {name}", head, count=1), 1), []


def _altered(folder: Path) -> Iterator[str]:
    """Files of an export that are not as it was written; the card may be edited."""
    if (folder / SETTINGS).is_file():
        try:
            digests = read_settings(folder).files
        except DamagedError as error:
            yield str(error)
            return
        for name, digest in digests.items():
            if name != CARD and _ALLOWED.fullmatch(name) and hash_file(folder / name) != digest:
                yield f"{name}: is altered since the export; run the same `declutr train` again"


def _private(files: dict[str, Path], card: str, folder: Path) -> Iterator[str]:
    """Files that name a folder of this user."""
    texts = {name: path.read_text("utf-8", "replace") for name, path in files.items() if path.suffix in _TEXTS}
    homes = {str(place) for place in (Path.home(), Path.cwd(), folder.absolute().parent, Path(tempfile.gettempdir()))}
    for name, text in (texts | {CARD: card}).items():
        for home in sorted(
            home for home in homes - {"/"} if re.search(rf"(?<![\w/]){re.escape(home)}(?=[/\"'\s])", text)
        ):
            yield f"{name}: names {home}, a folder of this machine; remove it from the file"


def write_folder(found: Publication, target: Path) -> None:
    """Writes what is published to a new folder.

    Raises:
        PublishError: the target exists.
    """
    if target.exists() or target.is_symlink():
        raise PublishError(f"{target}: exists already; name another folder, or delete it")
    if target.resolve().is_relative_to(found.files["modules.json"].parent.resolve()):
        raise PublishError(f"{target}: is inside of the encoder's folder; name a folder elsewhere")
    if problem := folder_problem(target):
        raise PublishError(f"{target}: {problem}")
    with atomic_folder(target) as aside:
        found.write(aside, PLACE)


def send(found: Publication, name: str) -> str:
    """Sends what is published to a new private repository of the hub, or to an empty one; returns its address.

    Raises:
        PublishError: the hub's client or a token is missing, the hub does not answer or refuses, or the repository has
            files.
    """
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError as error:
        raise PublishError("sending needs the package huggingface_hub: pip install huggingface_hub") from error
    if not get_token():
        raise PublishError(f"{name}: no token of the hub is known; run `hf auth login`, or set HF_TOKEN")
    if problem := hub_problem():
        raise PublishError(f"{name}: nothing was sent, because {problem}")
    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        full = set(api.list_repo_files(name)) - {".gitattributes"}
    except (OSError, ValueError, client_error()) as error:
        raise PublishError(f"{name}: nothing was sent ({str(error).splitlines()[0]})") from error
    if full:
        raise PublishError(f"{name}: exists already and has files; name another, or delete it on the hub")
    try:
        with tempfile.TemporaryDirectory(prefix="declutr-publish-") as folder:
            found.write(Path(folder), name)
            api.upload_folder(repo_id=name, folder_path=folder, commit_message="Add the encoder")
    except (OSError, ValueError, client_error()) as error:
        raise PublishError(f"{name}: the hub did not take it ({str(error).splitlines()[0]}); send it again") from error
    return f"{api.endpoint}/{name}"
