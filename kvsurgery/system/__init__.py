"""What programs need of a machine: files, memory, processes."""
