"""resources: to be described."""
