"""Whitespace collapsed to single spaces, in memory that does not depend on the number of words."""

_WHITESPACE = [chr(code) for code in range(0x3001) if chr(code).isspace() and chr(code) != " "]
"""Every whitespace character but the space; Unicode has none above U+3000 (a test looks)."""
_ASCII_WHITESPACE = [character for character in _WHITESPACE if character.isascii()]
_PIECE_CHARACTERS = 1 << 20


def normalise(text: str, piece_characters: int = _PIECE_CHARACTERS) -> str:
    """The text with whitespace collapsed to single spaces and stripped at both ends. Case is kept.

    Equal to `" ".join(text.split())`, which makes an object of every word: some twelve times the text's memory.
    """
    if len(text) <= piece_characters:
        return _collapse(text).strip(" ")
    kept: list[str] = []
    for start in range(0, len(text), piece_characters):
        piece = _collapse(text[start : start + piece_characters])
        # A piece keeps one space at either end; where two of them meet, or the text begins, one of them goes.
        if (not kept or kept[-1].endswith(" ")) and piece.startswith(" "):
            piece = piece[1:]
        if piece:
            kept.append(piece)
    return "".join(kept).rstrip(" ")


def _collapse(text: str) -> str:
    """Each run of whitespace as one space."""
    for character in _ASCII_WHITESPACE if text.isascii() else _WHITESPACE:
        text = text.replace(character, " ")
    while "  " in text:  # a run of n spaces is gone after log2(n) rounds
        text = text.replace("  ", " ")
    return text
