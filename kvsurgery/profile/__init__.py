"""Head profiles: the file format, importers, comparison, merging and display."""
