"""What people see: tables, progress and pictures."""
