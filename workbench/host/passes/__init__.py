"""passes: to be described."""
