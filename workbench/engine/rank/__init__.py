"""One rank from start to end."""
