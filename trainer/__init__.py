"""Trainer: commits -> token shards -> a trained, measured and exported DFlash drafter."""
