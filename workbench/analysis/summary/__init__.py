"""A run in a few values, and as frames."""
