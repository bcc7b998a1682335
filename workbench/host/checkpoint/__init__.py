"""Saves a rank's state as files, and restores it."""
