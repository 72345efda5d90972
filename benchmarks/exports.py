"""Size, speed and scores of every form that `declutr export` writes of an encoder.

    python -m benchmarks.exports --start FOLDER --json OUT [--stsb FOLDER] [--corpus FILE ...]

Each export is measured by the command itself: encoder, float32 graph and export in turns, on sentences of STS-B, or on
those of the corpus. The corpus of the table is the documentation of the installed Python packages, or the files given.
"""

import json
import tempfile
from pathlib import Path
from typing import Any, get_args

from benchmarks import record
from benchmarks.evaluate.embed import documentation
from declutr.evaluation.export.config import ExportConfig, Target
from declutr.evaluation.export.inputs import read_inputs
from declutr.evaluation.export.job import export

_STSB = Path("../shared/data/senteval/downstream/STS/STSBenchmark")


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    options = record.parser("exports", __doc__)
    options.add_argument("--start", required=True, metavar="FOLDER", help="encoder to export")
    options.add_argument("--stsb", type=Path, help=f"folder with sts-test.csv ({_STSB}, if it is there)")
    options.add_argument("--corpus", nargs="+", metavar="FILE", help="texts of the table; default: documentation")
    given = options.parse_args(arguments)
    facts = record.facts("exports", given.commit)
    stsb = given.stsb or (_STSB if _STSB.is_dir() else None)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        corpus = given.corpus or [str(_documentation(work / "documentation.jsonl"))]
        exports: list[dict[str, Any]] = []
        for kind in get_args(Target):
            settings = {"model": given.start, "to": kind, "output": work / kind, "stsb": stsb}
            config = ExportConfig.model_validate(settings | ({"corpus": corpus} if kind == "static" else {}))
            figures = export(config, read_inputs(config), facts)
            empty = {"stsb_before": None, "stsb_after": None}
            exports.append(empty | {key: value for key, value in figures.items() if key not in facts})
            record.progress(f"{kind}: {figures['speedup']} times as fast as {figures['compared_with']}")
    record.publish({"start": given.start, "exports": exports, **facts}, given.json)


def _documentation(path: Path) -> Path:
    """The documentation as a file of JSON Lines."""
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps({"text": text}) + "\n" for text in documentation())
    return path


if __name__ == "__main__":
    main()
