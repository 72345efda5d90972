"""`declutr demo`."""

import argparse

from declutr.common.console.terminal import refused


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="declutr demo", description="Prepare a corpus, train and measure encoders.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the train section to change")
    parser.add_argument("--config", default="configs/demo.yaml")
    given = parser.parse_intermixed_args(arguments)
    from declutr.common.config import load_config
    from declutr.common.console.logs import setup_logging
    from declutr.common.errors import ConfigError
    from declutr.pipeline.config import PipelineConfig
    from declutr.pipeline.job.path_checks import look as look_for_data
    from declutr.trainer.setup.config import TrainConfig

    try:  # before the corpus is prepared, and before torch is loaded
        load_config(given.config, "prepare", PipelineConfig, (), look_for_data)
        load_config(given.config, "train", TrainConfig, given.overrides)
    except ConfigError as error:
        return refused(error)
    from declutr.cli.run_demo import demo
    from declutr.common.errors import CheckpointError, DamagedError, RunStoppedError, ShardError, TrainingFailedError
    from declutr.trainer.driver.signals import say_stopped

    setup_logging("demo")
    try:
        for line in demo(given.config, given.overrides):
            print(line, flush=True)
    except (ConfigError, CheckpointError, DamagedError, ShardError, TrainingFailedError) as error:
        return refused(error)
    except (KeyboardInterrupt, RunStoppedError) as reason:
        return say_stopped(reason)
    return 0
