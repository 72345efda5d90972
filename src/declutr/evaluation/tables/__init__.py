"""Tables of several encoders' scores next to published ones: Markdown and JSON."""
