"""A run as a file or a picture."""
