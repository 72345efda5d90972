"""How much larger are SCL's dot products here than in the released code, which divides by the padded length?

    python -m benchmarks.scl_temperature --pairs snli_dev.jsonl --tokenizer FOLDER --json OUT

Premises and hypotheses of `--batch` pairs in a drawn order are padded to the longest text among them (`together`) or to
the longest of their own side (`apart`). The factor of a pair is the product of (padded length - 1) / (length - 1) of
both texts, CLS left out as in the paper. It depends on the lengths alone, so it is exact for a pair, and no one
temperature repeats it for all: the result gives its median and the range of 80% of all pairs.
"""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks import record


def factors(premises: NDArray[np.float64], hypotheses: NDArray[np.float64], together: bool) -> NDArray[np.float64]:
    """One factor for each pair of a batch, from the lengths in tokens (n,) of both texts, special tokens included."""
    padded = (max(premises.max(), hypotheses.max()),) * 2 if together else (premises.max(), hypotheses.max())
    of_pairs: NDArray[np.float64] = (padded[0] - 1) * (padded[1] - 1) / ((premises - 1) * (hypotheses - 1))
    return of_pairs


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = record.parser("scl_temperature", __doc__)
    parser.add_argument("--pairs", type=Path, required=True, help="JSON lines with premise and hypothesis")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--batch", type=int, default=64, help="pairs of a batch")
    options = record.parse(parser, arguments)
    rows = [json.loads(line) for line in options.pairs.read_text().splitlines()]
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    tokenizer.no_padding()
    lengths = [
        np.array([len(encoded) for encoded in tokenizer.encode_batch([row[side] for row in rows])], float)
        for side in ("premise", "hypothesis")
    ]
    order = np.random.default_rng(options.seed).permutation(len(rows))
    batches = [order[first : first + options.batch] for first in range(0, len(order), options.batch)]
    figures = {}
    for together in (True, False):
        of_pairs = np.concatenate([factors(lengths[0][batch], lengths[1][batch], together) for batch in batches])
        low, median, high = np.quantile(of_pairs, [0.1, 0.5, 0.9])
        figures["together" if together else "apart"] = {
            "median": round(float(median), 2), "range_of_80_percent": [round(float(low), 2), round(float(high), 2)]
        }  # fmt: skip
    record.publish({"benchmark": "scl_temperature", "pairs": len(rows), "batch": options.batch, **figures}, options)


if __name__ == "__main__":
    main()
