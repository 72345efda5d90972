"""What can happen to a run, by what it happens to."""
