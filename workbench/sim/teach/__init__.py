"""Laws and comparisons for lessons."""
