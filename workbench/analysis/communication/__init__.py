"""communication: to be described."""
