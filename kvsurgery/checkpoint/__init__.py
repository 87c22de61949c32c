"""Checkpoints on disk: safetensors headers, model families, side files, provenance and journal."""
