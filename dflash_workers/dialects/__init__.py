"""The two ways of speaking to an inference server: its own (sglang.py), everybody's (openai.py)."""
