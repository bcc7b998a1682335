"""Offload: strategies that keep state on the host or on disk, their verbs, and what both hosts do for these."""
