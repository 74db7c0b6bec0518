"""Scripts and programs for one GPU; each says in its first lines how it is run."""
