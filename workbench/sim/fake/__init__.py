"""fake: to be described."""
