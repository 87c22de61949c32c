"""Checkpoints on disk: strict safetensors headers, and the folder they lie in."""
