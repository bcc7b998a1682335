"""The dashboard as a whole."""
