"""stragglers: to be described."""
