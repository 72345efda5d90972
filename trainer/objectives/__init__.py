"""The objectives, a folder each."""
