"""Passes over parameters that lie in shards."""
