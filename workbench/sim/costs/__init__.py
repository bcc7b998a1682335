"""costs: to be described."""
