"""control: to be described."""
