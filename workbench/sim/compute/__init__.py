"""The computation of a virtual rank: verbs of a strategy, performed on the virtual clock."""
