"""Keeps a run going when ranks are lost, leave or join."""
