"""The record of a run: 3 append-only tables, its directory, checkpoints and the Run."""
