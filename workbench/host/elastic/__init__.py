"""elastic: to be described."""
