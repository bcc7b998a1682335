"""One virtual rank from start to end."""
