"""Sub-commands, one file each: `run(arguments)` parses the arguments and imports what the command needs."""

if __name__ != "declutr.cli":
    raise ImportError("import declutr.cli, not cli")
