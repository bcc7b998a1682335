"""reconfigure: to be described."""
