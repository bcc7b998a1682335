"""placement: to be described."""
