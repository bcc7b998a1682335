"""Runs for other tools, and traces of other jobs."""
