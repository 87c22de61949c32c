"""Scoring: measured head scores as a file (`HeadProfile`), imported or computed."""
