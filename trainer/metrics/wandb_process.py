"""Program that passes lines of metrics on its standard input to Weights & Biases.

It is a separate process: the package replaces `sys.exit` and hooks of the interpreter, waits for its server when a
process ends, and no error of it may reach the training. The first line has the arguments of `wandb.init`.
"""

import json
import sys

from declutr.trainer.metrics.loggers import tags

MISSING = "the package wandb is missing: pip install -e '.[wandb]' in the checkout"
# Nothing but metrics and the settings of the run is collected.
_SETTINGS = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "save_code": False,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


def main() -> int:
    """Passes lines on until the input ends; returns the exit status, and writes the reason of an error to stderr."""
    arguments = json.loads(sys.stdin.readline())
    try:
        import wandb
    except ImportError:
        sys.stderr.write(f"{MISSING}\n")
        return 1
    settings = wandb.Settings(**_SETTINGS, **arguments.pop("settings"))
    run = wandb.init(**arguments, resume="allow", settings=settings)
    for raw in sys.stdin:
        line = json.loads(raw)
        run.log(tags(line), step=line["step"])
    run.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
