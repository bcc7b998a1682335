"""memory: to be described."""
