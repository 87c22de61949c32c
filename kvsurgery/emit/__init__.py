"""Emitting: config, modeling code, model card and provenance of a converted checkpoint."""
