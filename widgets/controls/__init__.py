"""controls: to be described."""
