"""Cleaning and choosing: what is taken out of a document's text, and which documents are not kept, with reasons."""
