"""Tokens: one Arrow shard per commit, ids and loss mask exact by construction. No torch here."""
