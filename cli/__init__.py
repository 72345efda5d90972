"""The sub-commands, one file each: `run(arguments)` parses what follows the name and imports what it needs."""
