"""Checks that a message tells its facts (settings, values, limits, paths, remedies), however it is worded.

A fact that begins or ends with a letter or a digit is found as a whole: no `0` in `10`, no `data` in `validation.data`.
"""

import re


def all_of(*parts):
    """A pattern for `match=` that finds a line with all parts in any order: texts, numbers, or several of them."""
    return "(?m)^" + "".join(f"(?=.*{_whole(part)})" for part in _flat(parts))


def says(message, *parts):
    """Asserts that one line of a message, an error or a list of lines has all parts, and shows the lines otherwise."""
    text = "\n".join(map(str, [message] if isinstance(message, str | BaseException) else message))
    if not re.search(all_of(*parts), text):
        missing = [part for part in _flat(parts) if not re.search(_whole(part), text)]
        raise AssertionError(f"no line has all of {_flat(parts)}, none has {missing}:\n{text}")


def _flat(parts):
    return [str(text) for part in parts for text in (part if isinstance(part, tuple | list) else [part])]


def _whole(part):
    begin = r"(?<![\w.])(?<!\d,)" if part[:1].isalnum() else ""
    end = r"(?!\w|\.\w|,\d)" if part[-1:].isalnum() else ""
    return begin + re.escape(part).replace(r"\ ", " ") + end
