"""The preparation job: units of work, stages, restarts, estimates and progress."""
