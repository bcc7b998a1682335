"""compute: to be described."""
