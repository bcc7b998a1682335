"""engines: to be described."""
