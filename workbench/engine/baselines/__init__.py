"""baselines: to be described."""
