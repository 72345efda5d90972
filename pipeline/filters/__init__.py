"""Filters: rules that remove parts of a document's text or drop the document, with reasons."""
