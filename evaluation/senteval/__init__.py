"""SentEval's 28 tasks: data, its checks, procedures, scores and averages."""
