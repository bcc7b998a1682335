"""loop: to be described."""
