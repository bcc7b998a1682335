"""script: to be described."""
