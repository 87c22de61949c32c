"""What others published, as a `HeadProfile`: one module for each format."""
