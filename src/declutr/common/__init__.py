"""Code that every process needs first: configuration, randomness, safe files, logs. Imports no other package here."""

if __name__ != "declutr.common":
    raise ImportError("import declutr.common, not common")
