"""Conversion: moving the planned bytes into a folder that is either whole or does not load."""
