"""Checkpoints: what a rank holds, as files, and back."""
