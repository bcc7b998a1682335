"""processes: to be described."""
