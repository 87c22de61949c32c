"""Benchmark: time and memory of a converted checkpoint compared with the original, on the user's machine."""
