"""Applies a change between two steps."""
