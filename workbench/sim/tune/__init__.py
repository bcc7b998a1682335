"""Searches for the fastest settings."""
