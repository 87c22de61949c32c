"""Importers of published head scores as a `HeadProfile`, one module for each format."""
