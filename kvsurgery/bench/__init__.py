"""Benchmark: what a converted checkpoint takes of time and memory, beside the original, on the user's own machine."""
