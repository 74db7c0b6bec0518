"""Online training: shards in, hidden states of the frozen target on the fly, drafter out."""
