"""Text of token ids, without transformers, whose import takes longer than a look at shards."""

from collections.abc import Callable, Sequence
from pathlib import Path

from declutr.pipeline.shards.manifest import TOKENIZER

_FILE = "tokenizer.json"


def decoder(shards: Path) -> Callable[[Sequence[int]], str]:
    """A function that returns the text of tokens of these shards, special tokens included."""
    file = shards / TOKENIZER / _FILE
    if not file.is_file():  # a tokenizer that is only implemented in Python
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False)
        return lambda ids: str(slow.decode(ids)).strip()
    from tokenizers import Tokenizer

    fast = Tokenizer.from_file(str(file))
    return lambda ids: str(fast.decode(list(ids), skip_special_tokens=False)).strip()
