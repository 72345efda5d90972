"""Scores of several encoders in one table, beside published ones: Markdown, JSON and a page."""
