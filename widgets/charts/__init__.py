"""charts: to be described."""
