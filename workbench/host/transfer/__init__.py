"""Hands state from one strategy, partition or rank to another."""
