"""Mutation testing: bugs that were made by hand, and the tests that must notice them."""
