"""clock: to be described."""
