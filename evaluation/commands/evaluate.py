"""`declutr evaluate`: SentEval's data, fetched and checked."""

import argparse
from pathlib import Path


def run(arguments: list[str]) -> int:
    """Runs it; returns the exit status, 1 when a transfer failed or data are refused."""
    parser = argparse.ArgumentParser(prog="declutr evaluate", description="SentEval's data: fetch and check them.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--data", type=Path, help="folder in SentEval's layout (downstream/, probing/): check it")
    where.add_argument("--download", type=Path, help="fetch what is missing into this folder, then check it")
    parser.add_argument("--mirror", help="address that has the same files, instead of the public ones")
    parser.add_argument("--allow-unchecked", action="store_true", help="own data: mark what differs, do not refuse it")
    given = parser.parse_args(arguments)
    from evaluation.senteval.checking import inspect
    from evaluation.senteval.downloading import download
    from evaluation.senteval.overview import overview, transfers
    from evaluation.senteval.sources import public_sources, relocated
    from evaluation.senteval.tasks import TASKS

    failed = False
    if given.download:
        sources = relocated(public_sources(), given.mirror) if given.mirror else public_sources()
        fetched = download(given.download, sources, lambda line: print(line, flush=True))
        failed = any(file.outcome == "failed" for file in fetched)
        print("\n".join(transfers(fetched, sources)))
    inspections = [inspect(task, given.data or given.download, given.allow_unchecked) for task in TASKS]
    print("\n".join(overview(inspections)))
    return int(failed or any(inspection.standing == "refused" for inspection in inspections))
