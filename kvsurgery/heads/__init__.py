"""Heads of a model: dimensions, kinds, and their description in config.json."""
