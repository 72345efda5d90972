"""`declutr verify-gradients`."""

import argparse


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="declutr verify-gradients",
        description="Compare gradients: 1 process with N, whole batches with microbatches.",
    )
    parser.add_argument("config", help="YAML file with a `train` section")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of that section to change")
    parser.add_argument("--documents", type=int, default=8, help="most documents in the batch (8)")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3], help="numbers of workers to try (2 3)")
    options = parser.parse_intermixed_args(arguments)
    from declutr.common.config import load_config
    from declutr.trainer.driver.path_checks import place_problems
    from declutr.trainer.setup.config import TrainConfig

    if options.documents < 1 or min(options.processes) < 1:
        parser.error("--documents and --processes must be at least 1")
    config = load_config(options.config, "train", TrainConfig, options.overrides, place_problems)
    from declutr.trainer.driver.checks import load_problems, refuse, resolve
    from declutr.trainer.verify import verify

    resolved = resolve(config, of_run=False)
    refuse(load_problems(resolved))
    print("gradient of one batch, compared with 1 process and the whole batch at once")
    heads = ("precision", "processes", "microbatch", "loss diff", "largest", "relative")
    print("".join(f"{head:>11s}" for head in heads))
    apart = 0
    for row in verify(resolved.config, options.documents, options.processes):
        case, cut = row.case, row.case.microbatch_tokens or "whole"
        numbers = f"{row.loss:10.1e} {row.absolute:10.1e} {row.relative:10.1e}"
        within = "" if row.within else "  APART"
        print(f"{case.precision:>9s} {case.processes:9d} {cut:>10} {numbers}{within}", flush=True)
        apart += not row.within
    print("all equal up to rounding" if not apart else f"{apart} cases differ by more than rounding")
    return int(apart > 0)
