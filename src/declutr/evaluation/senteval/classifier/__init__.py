"""SentEval's classifiers, fitted for many training sets at a time."""
