"""Finds problems of ranks, links and records in a live run."""
