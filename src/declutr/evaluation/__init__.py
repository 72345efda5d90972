"""Use and evaluation of encoders: embeddings, indexes, scores and reports."""

if __name__ != "declutr.evaluation":
    raise ImportError("import declutr.evaluation, not evaluation")
