"""How profiles come about: gates, attention, retrieval and embedding heads, measured on a model."""
