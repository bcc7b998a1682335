"""A virtual rank's compute: verbs of a strategy, performed on the virtual clock."""
