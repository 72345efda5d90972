"""Fault matrix: real runs with real faults, compared with an undisturbed run."""
