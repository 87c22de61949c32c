"""Metrics of answers, as benchmarks define them, from 0 to 1."""
