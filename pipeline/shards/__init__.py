"""Files of a prepared corpus: shards, ledgers, manifest."""
