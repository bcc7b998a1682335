"""Computes what a strategy asks for, on the wall clock."""
