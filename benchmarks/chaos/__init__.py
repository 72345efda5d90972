"""The fault matrix: real runs, real faults, compared with the run that nobody disturbed."""
