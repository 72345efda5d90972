"""What every process needs first: configuration, randomness, safe files, logs. Imports nothing of ours."""
