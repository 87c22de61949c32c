"""Operating system helpers: files, locks, memory, processes."""
