"""Penn Treebank tokenisation of one sentence per line, by the rules with which SentEval prepares its data.

The rules are those of the Penn Treebank project's sed script of 1995 (SentEval's data/downstream/tokenizer.sed), to the
byte, including a space after every sentence, so that files can be compared with published hashes.
"""

import re

_CONTRACTED = ("ll", "re", "ve", "LL", "RE", "VE")
_MERGED = {  # contractions spoken as one word, and their parts
    r"([Cc])annot": r"\1an not",
    r"([Dd])'ye": r"\1' ye",
    r"([Gg])imme": r"\1im me",
    r"([Gg])onna": r"\1on na",
    r"([Gg])otta": r"\1ot ta",
    r"([Ll])emme": r"\1em me",
    r"([Mm])ore'n": r"\1ore 'n",
    r"'([Tt])is": r"'\1 is",
    r"'([Tt])was": r"'\1 was",
    r"([Ww])anna": r"\1an na",
}
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r'^"', "`` "),  # a quote opens at the start and after a space or a bracket; every other one closes
        (r'([ (\[{<])"', r"\1 `` "),
        (r"\.\.\.", " ... "),
        (r"[,;:@#$%&]", r" \g<0> "),
        (r"([^.])(\.)([\])}>\"']*) *$", r"\1 \2\3 "),  # only the last full stop: others may be abbreviations
        (r"[?!]", r" \g<0> "),
        (r"[\]\[(){}<>]", r" \g<0> "),
        (r"--", " -- "),
        (r"$", " "),
        (r"^", " "),
        (r'"', " '' "),
        (r"([^'])' ", r"\1 ' "),
        (r"'([sSmMdD]) ", r" '\1 "),
        *((f"'{end} ", f" '{end} ") for end in _CONTRACTED[:3]),
        ("n't ", " n't "),
        *((f"'{end} ", f" '{end} ") for end in _CONTRACTED[3:]),
        ("N'T ", " N'T "),
        *((f" {word} ", f" {parts} ") for word, parts in _MERGED.items()),
        (r" +", " "),
        (r"^ *", ""),
    )
]


def tokenize(line: str) -> str:
    """Separate words by one space, with one after the last; `line` has no line end."""
    for pattern, replacement in _RULES:
        line = pattern.sub(replacement, line)
    return line
