"""The papers' tables and figures: their runs, scores, and comparisons with the printed numbers."""

if __name__ != "declutr.reproduction":
    raise ImportError("import declutr.reproduction, not reproduction")
