"""What computation and communication cost."""
