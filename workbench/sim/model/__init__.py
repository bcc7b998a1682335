"""model: to be described."""
