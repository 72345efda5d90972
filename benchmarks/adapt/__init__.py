"""Adaptation of an encoder to documents, compared with other trainings: does it help, and is the verdict right?"""
