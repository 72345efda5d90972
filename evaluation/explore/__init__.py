"""An encoder looked at in a browser: the texts nearest to a sentence, and a map of an index."""
