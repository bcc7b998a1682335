"""summary: to be described."""
