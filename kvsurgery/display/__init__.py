"""Output for people: tables, progress and pictures."""
