"""An evaluation from an encoder to files of results, resumable."""
