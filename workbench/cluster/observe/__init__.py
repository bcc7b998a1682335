"""What needs a person's attention in a live run."""
