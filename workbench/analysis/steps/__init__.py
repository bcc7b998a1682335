"""steps: to be described."""
