"""Rows and orders between kernel and engines."""
