"""Logs, progress bars, and text that is safe in a terminal."""
