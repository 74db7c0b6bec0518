"""The producer's verbs: enqueue; what stops and mends a run; what became of its prompts."""
