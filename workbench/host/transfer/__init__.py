"""Hands state to another strategy, partition or rank."""
