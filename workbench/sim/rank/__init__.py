"""One virtual rank, from the start of its run to the end."""
