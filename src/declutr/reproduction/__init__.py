"""The papers' tables and figures: their runs, scores, and comparisons with the printed numbers."""
