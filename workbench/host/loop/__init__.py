"""The loop of a rank, the same on both hosts."""
