"""A rank's rows, and their way to disk and kernel."""
