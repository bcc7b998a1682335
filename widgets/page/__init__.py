"""page: to be described."""
