"""export: to be described."""
