"""api: to be described."""
