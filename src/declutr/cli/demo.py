"""`declutr demo`."""

import argparse


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="declutr demo", description="Prepare a corpus, train and measure encoders.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the train section to change")
    parser.add_argument("--config", default="configs/demo.yaml")
    options = parser.parse_intermixed_args(arguments)
    from declutr.common.config import load_config
    from declutr.common.console.logs import setup_logging
    from declutr.pipeline.config import PipelineConfig
    from declutr.pipeline.config import look as look_for_data
    from declutr.trainer.setup.config import TrainConfig

    # before the corpus is prepared, and before torch is loaded
    load_config(options.config, "prepare", PipelineConfig, (), look_for_data)
    load_config(options.config, "train", TrainConfig, options.overrides)
    from declutr.cli.run_demo import demo

    setup_logging("demo")
    for line in demo(options.config, options.overrides):
        print(line, flush=True)
    return 0
