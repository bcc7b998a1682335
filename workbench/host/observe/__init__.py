"""observe: to be described."""
