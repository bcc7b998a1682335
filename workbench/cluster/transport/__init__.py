"""transport: to be described."""
