"""core: to be described."""
