"""A user's own training loop or script."""
