"""Slow ranks, their causes and their cost to other ranks."""
