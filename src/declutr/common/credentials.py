"""Credentials in addresses: found, refused, and never shown.

Addresses that a command is given are written to manifests, plans, reports, logs and messages. So an address must not
hold a password or a signature. Stores take credentials from the environment.
"""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_HIDDEN = "***"
_SHOWN_CHARACTERS = 200
# A bucket has no port, and AWS's secrets hold slashes that people forget to escape: all up to the last "@".
_BUCKET_USER = re.compile(r"(?<=://)[^@\s'\"?]*:[^\s'\"?]*(?=@)")
_STORE = re.compile(r"\b(?:s3a?|gs|gcs|abfss?|az)(?=://)", re.IGNORECASE)
_PASSWORD = re.compile(r"(?<=://)[^/@\s'\"?#]*:[^/\s'\"?#]*(?=@)")
_WEB_USER = re.compile(r"(?<=\bhttp://)[^/@\s'\"?#]+(?=@)|(?<=\bhttps://)[^/@\s'\"?#]+(?=@)", re.IGNORECASE)
_OPTION = re.compile(r"(?<=[?&])(?P<key>[^=&#\s'\"]+)=(?P<value>[^&#\s'\"]+)")
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
        text = _BUCKET_USER.sub(_HIDDEN, text)
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
    secret = _SECRET_KEY.search(unquote(option["key"]))
    return f"{option['key']}={_HIDDEN if secret else option['value']}"
