"""The virtual clock, and what waits on it."""
