"""plan: to be described."""
