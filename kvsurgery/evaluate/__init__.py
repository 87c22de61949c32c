"""Evaluation: what a converted checkpoint keeps of the original's answers, measured through its cache."""
