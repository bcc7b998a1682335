"""Engines: the ranks of a lab over ipyparallel."""
