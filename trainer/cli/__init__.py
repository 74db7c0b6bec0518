"""The trainer's verbs: tokenize, drift, compact; gate, show; train, evaluate, parity, export."""
