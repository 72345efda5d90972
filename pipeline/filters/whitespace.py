"""Whitespace normalisation whose memory does not depend on the number of words."""

_WHITESPACE = [chr(code) for code in range(0x3001) if chr(code).isspace() and chr(code) != " "]
"""Every whitespace character except the space; Unicode has none above U+3000 (checked by a test)."""
_ASCII_WHITESPACE = [character for character in _WHITESPACE if character.isascii()]
_PIECE_CHARACTERS = 1 << 20


def normalise(text: str, piece_characters: int = _PIECE_CHARACTERS) -> str:
    """Collapses whitespace to single spaces and strips both ends. Case is kept.

    Equal to `" ".join(text.split())`, which creates an object for each word: about twelve times the text's memory.
    """
    if len(text) <= piece_characters:
        return _collapse(text).strip(" ")
    kept: list[str] = []
    for start in range(0, len(text), piece_characters):
        piece = _collapse(text[start : start + piece_characters])
        # A piece keeps one space at either end; it is removed where two of them meet and at the start of the text.
        if (not kept or kept[-1].endswith(" ")) and piece.startswith(" "):
            piece = piece[1:]
        if piece:
            kept.append(piece)
    return "".join(kept).rstrip(" ")


def _collapse(text: str) -> str:
    """Replaces each run of whitespace by one space."""
    for character in _ASCII_WHITESPACE if text.isascii() else _WHITESPACE:
        text = text.replace(character, " ")
    while "  " in text:  # a run of n spaces is gone after log2(n) rounds
        text = text.replace("  ", " ")
    return text
