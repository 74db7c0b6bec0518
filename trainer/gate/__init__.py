"""The data gate: what a run's shards hold, and whether that may be trained on."""
