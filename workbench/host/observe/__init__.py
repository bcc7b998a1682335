"""Measures and watches a rank while it trains."""
