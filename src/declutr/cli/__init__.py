"""Sub-commands, one file each: `run(arguments)` parses the arguments and imports what the command needs."""
