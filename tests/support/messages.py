"""Checks that a message tells its facts, however it is worded.

A fact is a setting, a value, a limit, a path, a count, a command, or a word or two of the remedy. A fact that begins or
ends with a letter or a digit is found as a whole: `0` is not found in `10`, nor `data` in `validation.data`.
"""

import re


def all_of(*parts):
    """A pattern for `match=` that finds a line with all parts, in any order.

    A part is a text, a number, or several of them.
    """
    return "(?m)^" + "".join(f"(?=.*{_whole(part)})" for part in _flat(parts))


def says(message, *parts):
    """Asserts that one line of a message, an error or a list of lines has all parts, and shows the lines otherwise."""
    lines = [message] if isinstance(message, str | BaseException) else message
    text = "\n".join(map(str, lines))
    if not re.search(all_of(*parts), text):
        missing = [part for part in _flat(parts) if not re.search(_whole(part), text)]
        raise AssertionError(f"no line has all of {_flat(parts)}, none has {missing}:\n{text}")


def _flat(parts):
    return [str(text) for part in parts for text in (part if isinstance(part, tuple | list) else [part])]


def _whole(part):
    begin = r"(?<![\w.])(?<!\d,)" if part[:1].isalnum() else ""
    end = r"(?!\w|\.\w|,\d)" if part[-1:].isalnum() else ""
    return begin + re.escape(part).replace(r"\ ", " ") + end
