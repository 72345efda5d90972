"""Tables of several encoders' scores next to published ones: Markdown, JSON and a page."""
