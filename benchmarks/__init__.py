"""Benchmarks: programs that end in figures, and the results of full runs."""
