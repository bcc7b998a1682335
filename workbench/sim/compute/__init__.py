"""What a virtual rank computes."""
