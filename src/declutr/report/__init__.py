"""Pages for the person who decides: on a prepared corpus, on runs, on an adaptation, on tables of scores."""
