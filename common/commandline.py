"""Command-line arguments that `prepare` and `train` share: a config file, overrides and `--print-config`."""

import argparse


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
