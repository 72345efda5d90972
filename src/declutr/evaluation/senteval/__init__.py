"""SentEval: tasks, data, protocols, classifiers and scores."""
