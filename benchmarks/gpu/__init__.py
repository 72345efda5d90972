"""The trainer on a GPU: checks, measurements, and what can be counted without one."""
