"""run: to be described."""
