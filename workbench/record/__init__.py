"""The record of a run: 3 append-only tables, the run directory, checkpoints and the Run."""
