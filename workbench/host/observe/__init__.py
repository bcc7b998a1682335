"""Measures a rank while it trains."""
