"""Code that every process needs first: configuration, randomness, safe files, logs. Imports no other package here."""
