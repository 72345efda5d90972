"""The preparation job: units of work, their stages, restarts, estimates and progress."""
