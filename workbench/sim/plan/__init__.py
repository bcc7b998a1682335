"""Predictions of what other settings would cost."""
