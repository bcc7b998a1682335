"""The board: all charts of a run as one widget."""
