"""Predictions: what would another setting cost?."""
