"""tune: to be described."""
