"""Memory, GPUs and the cost of recording."""
