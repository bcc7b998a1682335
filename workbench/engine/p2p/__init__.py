"""p2p: to be described."""
