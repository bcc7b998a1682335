"""Passes over sharded parameters."""
