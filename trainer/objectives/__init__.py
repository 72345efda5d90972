"""Training objectives, one folder for each."""
