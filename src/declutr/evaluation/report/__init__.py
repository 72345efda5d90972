"""A page about a prepared corpus, for the person who decides whether to train on it."""
