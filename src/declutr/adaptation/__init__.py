"""Adaptation of an encoder to documents: the closed form, training, comparison, and the verdict."""
