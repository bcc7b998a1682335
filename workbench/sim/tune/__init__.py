"""Search for the fastest setting."""
