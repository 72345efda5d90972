"""The console command `declutr`. Each sub-command imports what it needs when it runs."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `declutr COMMAND ...`; returns the exit status, 1 when the user has something to mend."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, tuple[str, Callable[[list[str]], int]]] = {
        "prepare": ("CONFIG [key=value ...]: a corpus to Arrow shards", _prepare),
        "train": ("CONFIG [key=value ...]: shards to a sentence encoder", _train),
        "verify-gradients": ("CONFIG [key=value ...]: is the gradient the same however it is computed?", _verify),
        "embed": ("MODEL INPUT --output OUT: texts to embeddings", _embed),
        "evaluate": ("--data DIR | --download DIR: SentEval's data, fetched and checked", _evaluate),
        "inspect": ("PATH: what shards, a run or a checkpoint hold", _inspect),
        "report": ("SHARDS [--output FOLDER]: a page on a prepared corpus", _report),
        "demo": ("the whole path on a corpus that every machine has", _demo),
    }
    if not arguments or arguments[0] not in commands:
        print("usage: declutr COMMAND ...\n")
        for name, (what, _) in commands.items():
            print(f"  declutr {name} {what}")
        return 0 if arguments[:1] in ([], ["-h"], ["--help"]) else 1
    return commands[arguments[0]][1](arguments[1:])


def _prepare(arguments: list[str]) -> int:
    from pipeline.prepare import main as prepare

    return prepare(arguments)


def _train(arguments: list[str]) -> int:
    from trainer.train import main as train

    return train(arguments)


def _verify(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="declutr verify-gradients", description="1 process against N, whole and cut.")
    parser.add_argument("config", help="YAML file with a `train` section")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of that section to change")
    parser.add_argument("--documents", type=int, default=8, help="documents of the batch, at most (8)")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3], help="numbers of workers to try (2 3)")
    given = parser.parse_args(arguments)
    from common.config import ConfigError, load_config
    from trainer.checks import problems, refuse
    from trainer.config import TrainConfig
    from trainer.verify import verify

    try:
        config = load_config(given.config, "train", TrainConfig, given.overrides)
        refuse([problem for problem in problems(config) if not problem.startswith("run =")])
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    print("gradient of one batch against 1 process with the whole batch at once")
    heads = ("precision", "processes", "microbatch", "loss diff", "largest", "relative")
    print("".join(f"{head:>11s}" for head in heads))
    apart = 0
    for row in verify(config, given.documents, given.processes):
        case, cut = row.case, row.case.microbatch_tokens or "whole"
        numbers = f"{row.loss:10.1e} {row.absolute:10.1e} {row.relative:10.1e}"
        print(
            f"{case.precision:>9s} {case.processes:9d} {cut:>10} {numbers}{'' if row.within else '  APART'}", flush=True
        )
        apart += not row.within
    print("the same up to rounding" if not apart else f"{apart} cases differ by more than rounding")
    return int(apart > 0)


def _embed(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="declutr embed", description="Texts to embeddings.")
    parser.add_argument("model", help="exported folder, or a name that transformers knows")
    parser.add_argument("input", type=Path, help=".jsonl, .parquet, or one text a line")
    parser.add_argument("--output", type=Path, required=True, help=".npy or .parquet")
    parser.add_argument("--text-field", default="text", help="field or column of the text (text)")
    given = parser.parse_args(arguments)
    from evaluation.embed import EmbedError, embed_file
    from evaluation.encoder import EncoderError

    try:
        number = embed_file(given.model, given.input, given.output, given.text_field)
    except (EmbedError, EncoderError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    print(f"{given.output}: {number} embeddings")
    return 0


def _evaluate(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="declutr evaluate", description="SentEval's data: fetch and check them.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--data", type=Path, help="folder in SentEval's layout (downstream/, probing/): check it")
    where.add_argument("--download", type=Path, help="fetch what is missing into this folder, then check it")
    parser.add_argument("--mirror", help="address that has the same files, instead of the public ones")
    parser.add_argument("--allow-unchecked", action="store_true", help="own data: mark what differs, do not refuse it")
    given = parser.parse_args(arguments)
    from evaluation.senteval.checking import inspect
    from evaluation.senteval.overview import overview, transfers
    from evaluation.senteval.tasks import TASKS

    failed = False
    if given.download:
        from evaluation.senteval.downloading import download
        from evaluation.senteval.sources import public_sources, relocated

        sources = relocated(public_sources(), given.mirror) if given.mirror else public_sources()
        fetched = download(given.download, sources, lambda line: print(line, flush=True))
        failed = any(file.outcome == "failed" for file in fetched)
        print("\n".join(transfers(fetched, sources)))
    inspections = [inspect(task, given.data or given.download, given.allow_unchecked) for task in TASKS]
    print("\n".join(overview(inspections)))
    return int(failed or any(inspection.standing == "refused" for inspection in inspections))


def _inspect(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="declutr inspect", description="What lies at a path, in words.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--documents", type=int, default=3, help="documents of shards to show with their spans (3)")
    parser.add_argument("--document", help="of shards: one document, by id, source or SOURCE:OFFSET")
    parser.add_argument("--config", help="YAML file with a `train` section: show its run's spans")
    parser.add_argument("--seed", type=int, help="seed of the spans shown (the config's, else 0)")
    parser.add_argument("--epoch", type=int, default=0, help="epoch of the spans shown (0)")
    given = parser.parse_args(arguments)
    from common.config import ConfigError, load_config
    from evaluation.describe import DescribeError, default_spans, describe
    from evaluation.whereabouts import whereabouts
    from pipeline.shards import ShardError, load_manifest
    from trainer.checkpoint import CheckpointError
    from trainer.config import TrainConfig

    try:
        run = load_config(given.config, "train", TrainConfig, []) if given.config else None
        seed = given.seed if given.seed is not None else run.seed if run else 0
        if given.document:
            spans = run.spans if run else default_spans(load_manifest(given.path))
            lines = whereabouts(given.path, given.document, spans, seed, given.epoch)
        else:
            lines = describe(given.path, given.documents, seed, given.epoch)
        for line in lines:
            print(line)
    except (ConfigError, DescribeError, ShardError, CheckpointError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _report(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="declutr report", description="A page on a prepared corpus, with charts.")
    parser.add_argument("shards", type=Path, help="output folder of `prepare`")
    parser.add_argument("--output", type=Path, help="folder of report.html and charts/*.png (SHARDS/report)")
    given = parser.parse_args(arguments)
    from evaluation.report.write import write_report
    from pipeline.shards import ShardError

    try:
        print(write_report(given.shards, given.output))
    except ShardError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _demo(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="declutr demo", description="From a corpus to a measured encoder.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the train section to change")
    parser.add_argument("--config", default="configs/demo.yaml")
    given = parser.parse_args(arguments)
    from common.config import ConfigError
    from common.logs import setup_logging
    from evaluation.demo import demo
    from pipeline.shards import ShardError
    from trainer.train import TrainingFailedError

    setup_logging("demo")
    try:
        for line in demo(given.config, given.overrides):
            print(line, flush=True)
    except (ConfigError, ShardError, TrainingFailedError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
