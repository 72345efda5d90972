"""Parts of commands: the arguments that `prepare` and `train` share, and the end of a command that was refused."""

import argparse
import sys


def config_parser(section: str, description: str) -> argparse.ArgumentParser:
    """A parser for `CONFIG [key=value ...] [--print-config]`; call `parse_intermixed_args` on it.

    Args:
        section: name of the command and of its section in the config file.
        description: one sentence for `--help`.
    """
    parser = argparse.ArgumentParser(prog=f"declutr {section}", description=description)
    parser.add_argument("config", help=f"YAML file with a `{section}` section")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of that section to change")
    parser.add_argument("--print-config", action="store_true", help="show all settings with meanings and stop")
    return parser


def refused(reason: object) -> int:
    """Write the reason to stderr; return exit status 1."""
    sys.stderr.write(f"{reason}\n")
    return 1
