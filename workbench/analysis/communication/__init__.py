"""Collectives, messages and bandwidth."""
