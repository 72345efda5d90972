"""Adaptation of an encoder to documents: the closed form, training, comparison, and the verdict."""

if __name__ != "declutr.adaptation":
    raise ImportError("import declutr.adaptation, not adaptation")
