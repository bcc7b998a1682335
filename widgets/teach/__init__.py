"""teach: to be described."""
