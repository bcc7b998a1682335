"""What a rank measures while it trains."""
