"""record: to be described."""
